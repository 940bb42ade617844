import re

from headwater.metrics import names

TAGS = [value for name, value in vars(names).items() if name.isupper()]

# What the notes and scripts of users name; more may be added, none may go or change.
RELIED_ON = {
    "train": "loss reward grad_norm lr token_mult_prob_error gen_kl_error probs_ratio probs_ratio_min probs_ratio_max "
    "probs_ratio_clamped probs_ratio_clamped_min probs_ratio_clamped_max approx_entropy kl_penalty advantages/mean "
    "advantages/min advantages/max mean_gen_tokens_per_sample num_trainable_parameters",
    "train/critic": "loss explained_var vf_clipfrac",
    "validation": "accuracy avg_length",
    "timing/train": "total_step_time generation policy_and_reference_logprobs policy_training checkpointing",
    "timing/train/prepare_for_generation": "total transfer_and_update_weights",
    "timing/train/prepare_for_generation/weight_transfer": "producer/collect_tensors producer/sparse_encode "
    "producer/sparse_nonzero transport consumer/decode_sparse consumer/load_delta",
    "refit": "version bytes changed_pct digest_ok",
    "checkpoint": "stall_s stage_s write_s commit_s bytes fence_wait_s writer_restarts pending chunks_advanced "
    "chunks_repeated busy_wait_s skipped",
    "performance": "tokens_per_sec generation_tokens_per_sec",
    "memory": "allocated reserved retained_after_offload",
}


def test_every_tag_that_users_rely_on_is_spelled_as_they_know_it():
    expected = {f"{group}/{tag}" for group, tags in RELIED_ON.items() for tag in tags.split()}
    assert len(expected) == 58
    assert expected - set(TAGS) == set()


def test_tags_are_distinct_and_well_formed():
    assert len(set(TAGS)) == len(TAGS)
    assert all(re.fullmatch(r"[a-z_]+(/[a-z_]+)+", tag) for tag in TAGS)
