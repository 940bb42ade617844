"""Qwen2-MoE and Qwen3-MoE: many small experts; Qwen2-MoE has one that all tokens share."""

from typing import Any

from headwater.bridge.families.llama import ATTENTION, ENDS
from headwater.bridge.families.qwen2 import BIAS
from headwater.bridge.families.qwen3 import HEAD_NORMS
from headwater.bridge.family import Family
from headwater.bridge.pieces import Copied, GateUp, Output

_MLP = "decoder.layers.{layer}.mlp."
_STORED = "model.layers.{layer}.mlp."
_EXPERT, _STORED_EXPERT = _MLP + "experts.local_experts.{expert}.", _STORED + "experts.{expert}."

EXPERTS = (
    Copied(_MLP + "router.weight", _STORED + "gate.weight", ("experts", "hidden")),
    GateUp(
        _EXPERT + "linear_fc1.weight",
        _STORED_EXPERT + "gate_proj.weight",
        _STORED_EXPERT + "up_proj.weight",
        "expert_feed_forward",
    ),
    Output(_EXPERT + "linear_fc2.weight", _STORED_EXPERT + "down_proj.weight", "expert_feed_forward"),
)
SHARED_EXPERT = (
    Copied(_MLP + "shared_experts.gate_weight", _STORED + "shared_expert_gate.weight", (1, "hidden")),
    GateUp(
        _MLP + "shared_experts.linear_fc1.weight",
        _STORED + "shared_expert.gate_proj.weight",
        _STORED + "shared_expert.up_proj.weight",
        "shared_expert_feed_forward",
    ),
    Output(
        _MLP + "shared_experts.linear_fc2.weight",
        _STORED + "shared_expert.down_proj.weight",
        "shared_expert_feed_forward",
    ),
)


def _settings(config: Any) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        # Weights of the experts chosen are those of a softmax over all, or over these alone.
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }


QWEN2_MOE = Family(
    "qwen2_moe",
    ("qwen2_moe",),
    (*ENDS, *ATTENTION, BIAS, *EXPERTS, *SHARED_EXPERT),
    settings=lambda config: {
        **_settings(config),
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    },
    dimensions=lambda config: {
        "experts": config.num_experts,
        "expert_feed_forward": config.moe_intermediate_size,
        "shared_expert_feed_forward": config.shared_expert_intermediate_size,
    },
)
QWEN3_MOE = Family(
    "qwen3_moe",
    ("qwen3_moe",),
    (*ENDS, *ATTENTION, *HEAD_NORMS, *EXPERTS),
    settings=lambda config: {**_settings(config), "qk_layernorm": True},
    dimensions=lambda config: {"experts": config.num_experts, "expert_feed_forward": config.moe_intermediate_size},
)
