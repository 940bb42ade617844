from pathlib import Path

import pytest

from headwater.checkpoint.foreign.names import assign_weights, classify
from headwater.checkpoint.foreign.record import ByteRange, Role, StoredChunk

GBUF = "gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_1"


@pytest.mark.parametrize(
    ("key", "role", "component", "parameter"),
    [
        ("optimizer.state.exp_avg.model.layers.0.weight", "exp_avg", "", "model.layers.0.weight"),
        ("optimizer.state.step.w", "step", "", "w"),
        ("optim.state.layers.0.weight.exp_avg_sq", "exp_avg_sq", "", "layers.0.weight"),
        ("optim.state.0.exp_avg", "exp_avg", "", "0"),
        ("state.w.step", "step", "", "w"),
        ("optimizer.state.w.max_exp_avg_sq", "other", "", "w"),
        ("policy.optimizer.state.param.w", "param", "policy", "w"),
        ("value_optim.state.w.exp_avg", "exp_avg", "value", "w"),
        ("policy.optimizer_states.state.w.exp_avg", "exp_avg", "policy", "w"),
        ("chained_1.optimizer.state.exp_avg_sq.experts.w", "exp_avg_sq", "", "experts.w"),
        ("optimizer.chained_0.state.param.w", "param", "", "w"),
        (
            f"optimizer.distributed.dp_group_idx_0.{GBUF}.exp_avg",
            "exp_avg",
            "",
            f"optimizer.distributed.dp_group_idx_0.{GBUF}",
        ),
        (f"chained_0.optimizer.{GBUF}.param", "param", "", f"chained_0.optimizer.{GBUF}"),
        ("model.layers.0.weight", "weight", "", "model.layers.0.weight"),
        ("model.state_encoder.weight", "weight", "", "model.state_encoder.weight"),
        ("rng_state/shard_0_1", "other", "", "rng_state/shard_0_1"),
        ("optim.param_groups.0.lr", "other", "", "optim.param_groups.0.lr"),
        ("optimizer.state.w.exp_avg.scale", "other", "", "optimizer.state.w.exp_avg.scale"),
        ("optim_value.state.w.exp_avg", "exp_avg", "value", "w"),
        ("adopt.state.w.exp_avg", "exp_avg", "adopt", "w"),
        ("lr_scheduler.last", "other", "", "lr_scheduler.last"),
    ],
)
def test_names_are_understood(key: str, role: str, component: str, parameter: str):
    meaning = classify(key, "F32")
    assert (meaning.role, meaning.component, meaning.parameter) == (role, component, parameter)


def test_integers_are_no_weights():
    assert classify("model.position_ids", "I64").role == "other"


def test_a_scalar_is_no_weight():
    scale = StoredChunk("", "weight", "scale", "scale", (), (), "F32", ByteRange(Path("x"), 0, 4))
    assert [c.role for c in assign_weights([scale])] == ["other"]


def chunk(key: str, role: Role, component: str = "", parameter: str = "") -> StoredChunk:
    return StoredChunk(component, role, parameter or key, key, (0,), (1,), "F32", ByteRange(Path("x"), 0, 4))


def assigned(*chunks: StoredChunk) -> dict[str, tuple[str, str]]:
    return {c.key: (c.component, c.parameter) for c in assign_weights(chunks) if c.role == "weight"}


def test_a_weight_belongs_to_the_parameter_whose_name_it_ends_with():
    found = assigned(chunk("model.a.w", "weight"), chunk("s", "exp_avg", "", "a.w"), chunk("model.frozen.w", "weight"))
    assert found == {"model.a.w": ("", "a.w"), "model.frozen.w": ("", "model.frozen.w")}


def test_a_weight_goes_to_the_component_that_it_is_named_after():
    states = chunk("s", "exp_avg", "policy", "w"), chunk("t", "exp_avg", "value", "w")
    weights = chunk("policy.model.w", "weight"), chunk("value.model.w", "weight"), chunk("value.model.buffer", "weight")
    assert {key: owner for key, (owner, _) in assigned(*states, *weights).items()} == {
        "policy.model.w": "policy",
        "value.model.w": "value",
        "value.model.buffer": "value",
    }


def test_the_only_component_owns_all_weights():
    assert assigned(chunk("s", "exp_avg", "adam", "x"), chunk("net.w", "weight")) == {"net.w": ("adam", "net.w")}
