"""Qwen3: Llama with a norm over each head's query and key."""

from headwater.bridge.families.llama import ATTENTION, ENDS, FEED_FORWARD
from headwater.bridge.family import Family
from headwater.bridge.pieces import Copied

HEAD_NORMS = tuple(
    Copied(
        f"decoder.layers.{{layer}}.self_attention.{which}_layernorm.weight",
        f"model.layers.{{layer}}.self_attn.{which}_norm.weight",
        ("head_size",),
    )
    for which in ("q", "k")
)

FAMILY = Family(
    "qwen3", ("qwen3",), (*ENDS, *ATTENTION, *HEAD_NORMS, *FEED_FORWARD), settings=lambda _: {"qk_layernorm": True}
)
