"""The metric tags that users rely on, those of parts that are yet to come included."""

from typing import Final

# Training: means over the tokens or completions of a step, unless the name says otherwise.
TRAIN_LOSS: Final = "train/loss"
TRAIN_REWARD: Final = "train/reward"
TRAIN_REWARD_STD: Final = "train/reward_std"
TRAIN_GROUPS_WITH_SIGNAL: Final = "train/groups_with_signal"
TRAIN_OPTIM_STEPS: Final = "train/optim_steps"
TRAIN_GRAD_NORM: Final = "train/grad_norm"
TRAIN_LR: Final = "train/lr"
TRAIN_TOKEN_MULT_PROB_ERROR: Final = "train/token_mult_prob_error"
TRAIN_GEN_KL_ERROR: Final = "train/gen_kl_error"
TRAIN_PROBS_RATIO: Final = "train/probs_ratio"
TRAIN_PROBS_RATIO_MIN: Final = "train/probs_ratio_min"
TRAIN_PROBS_RATIO_MAX: Final = "train/probs_ratio_max"
TRAIN_PROBS_RATIO_CLAMPED: Final = "train/probs_ratio_clamped"
TRAIN_PROBS_RATIO_CLAMPED_MIN: Final = "train/probs_ratio_clamped_min"
TRAIN_PROBS_RATIO_CLAMPED_MAX: Final = "train/probs_ratio_clamped_max"
TRAIN_APPROX_ENTROPY: Final = "train/approx_entropy"
TRAIN_KL_PENALTY: Final = "train/kl_penalty"
TRAIN_ADVANTAGES_MEAN: Final = "train/advantages/mean"
TRAIN_ADVANTAGES_MIN: Final = "train/advantages/min"
TRAIN_ADVANTAGES_MAX: Final = "train/advantages/max"
TRAIN_MEAN_GEN_TOKENS_PER_SAMPLE: Final = "train/mean_gen_tokens_per_sample"
TRAIN_NUM_TRAINABLE_PARAMETERS: Final = "train/num_trainable_parameters"

# The critic of PPO.
TRAIN_CRITIC_LOSS: Final = "train/critic/loss"
TRAIN_CRITIC_EXPLAINED_VAR: Final = "train/critic/explained_var"
TRAIN_CRITIC_VF_CLIPFRAC: Final = "train/critic/vf_clipfrac"
TRAIN_CRITIC_GRAD_NORM: Final = "train/critic/grad_norm"
TRAIN_CRITIC_LR: Final = "train/critic/lr"
TRAIN_CRITIC_OPTIM_STEPS: Final = "train/critic/optim_steps"

# Validation.
VALIDATION_ACCURACY: Final = "validation/accuracy"
VALIDATION_REWARD: Final = "validation/reward"
VALIDATION_AVG_LENGTH: Final = "validation/avg_length"

# Wall-clock seconds within a step.
TIMING_TOTAL_STEP_TIME: Final = "timing/train/total_step_time"
TIMING_GENERATION: Final = "timing/train/generation"
TIMING_REWARD: Final = "timing/train/reward"
TIMING_POLICY_AND_REFERENCE_LOGPROBS: Final = "timing/train/policy_and_reference_logprobs"
TIMING_POLICY_TRAINING: Final = "timing/train/policy_training"
TIMING_VALUES: Final = "timing/train/values"
TIMING_VALUE_TRAINING: Final = "timing/train/value_training"
TIMING_CHECKPOINTING: Final = "timing/train/checkpointing"
TIMING_PREPARE_TOTAL: Final = "timing/train/prepare_for_generation/total"
TIMING_PREPARE_TRANSFER_AND_UPDATE_WEIGHTS: Final = "timing/train/prepare_for_generation/transfer_and_update_weights"

# Wall-clock seconds of a weight transfer, by who spends them.
TIMING_PRODUCER_COLLECT_TENSORS: Final = "timing/train/prepare_for_generation/weight_transfer/producer/collect_tensors"
TIMING_PRODUCER_SPARSE_ENCODE: Final = "timing/train/prepare_for_generation/weight_transfer/producer/sparse_encode"
TIMING_PRODUCER_SPARSE_NONZERO: Final = "timing/train/prepare_for_generation/weight_transfer/producer/sparse_nonzero"
TIMING_TRANSPORT: Final = "timing/train/prepare_for_generation/weight_transfer/transport"
TIMING_CONSUMER_DECODE_SPARSE: Final = "timing/train/prepare_for_generation/weight_transfer/consumer/decode_sparse"
TIMING_CONSUMER_LOAD_DELTA: Final = "timing/train/prepare_for_generation/weight_transfer/consumer/load_delta"

# Weight sync: version and bytes are counts, changed_pct a percentage, digest_ok 1 or 0.
REFIT_VERSION: Final = "refit/version"
REFIT_BYTES: Final = "refit/bytes"
REFIT_CHANGED_PCT: Final = "refit/changed_pct"
REFIT_DIGEST_OK: Final = "refit/digest_ok"

# Checkpoints: names ending in _s are wall-clock seconds.
CHECKPOINT_STALL_S: Final = "checkpoint/stall_s"
CHECKPOINT_STAGE_S: Final = "checkpoint/stage_s"
CHECKPOINT_COPY_S: Final = "checkpoint/copy_s"
CHECKPOINT_WRITE_S: Final = "checkpoint/write_s"
CHECKPOINT_READBACK_S: Final = "checkpoint/readback_s"
CHECKPOINT_COMMIT_S: Final = "checkpoint/commit_s"
CHECKPOINT_BYTES: Final = "checkpoint/bytes"
CHECKPOINT_FENCE_WAIT_S: Final = "checkpoint/fence_wait_s"
CHECKPOINT_WRITER_RESTARTS: Final = "checkpoint/writer_restarts"
CHECKPOINT_BUSY_WAIT_S: Final = "checkpoint/busy_wait_s"
CHECKPOINT_SKIPPED: Final = "checkpoint/skipped"
CHECKPOINT_PENDING: Final = "checkpoint/pending"
CHECKPOINT_CHUNKS_ADVANCED: Final = "checkpoint/chunks_advanced"
CHECKPOINT_CHUNKS_REPEATED: Final = "checkpoint/chunks_repeated"

# Completion tokens a second of the whole step and of generation alone; device memory in bytes.
PERFORMANCE_TOKENS_PER_SEC: Final = "performance/tokens_per_sec"
PERFORMANCE_GENERATION_TOKENS_PER_SEC: Final = "performance/generation_tokens_per_sec"
MEMORY_ALLOCATED: Final = "memory/allocated"
MEMORY_RESERVED: Final = "memory/reserved"
MEMORY_RETAINED_AFTER_OFFLOAD: Final = "memory/retained_after_offload"
