"""Mixtral: Llama with experts in place of the feed-forward layer."""

from typing import Any

from headwater.bridge.families.llama import ATTENTION, ENDS
from headwater.bridge.family import Family
from headwater.bridge.pieces import Copied, GateUp, Output

_EXPERT = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
_STORED = "model.layers.{layer}.block_sparse_moe."

EXPERTS = (
    Copied("decoder.layers.{layer}.mlp.router.weight", _STORED + "gate.weight", ("experts", "hidden")),
    GateUp(
        _EXPERT + "linear_fc1.weight",
        _STORED + "experts.{expert}.w1.weight",
        _STORED + "experts.{expert}.w3.weight",
        "expert_feed_forward",
    ),
    Output(_EXPERT + "linear_fc2.weight", _STORED + "experts.{expert}.w2.weight", "expert_feed_forward"),
)


def _settings(config: Any) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_local_experts,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
    }


FAMILY = Family(
    "mixtral",
    ("mixtral",),
    (*ENDS, *ATTENTION, *EXPERTS),
    settings=_settings,
    dimensions=lambda c: {"experts": c.num_local_experts, "expert_feed_forward": c.intermediate_size},
)
