"""Qwen2 and Qwen2.5: Llama with a bias in queries, keys and values."""

from headwater.bridge.families.llama import ATTENTION, ENDS, FEED_FORWARD
from headwater.bridge.family import Family
from headwater.bridge.pieces import QueryKeyValue

BIAS = QueryKeyValue(
    "decoder.layers.{layer}.self_attention.linear_qkv.bias",
    "model.layers.{layer}.self_attn.q_proj.bias",
    "model.layers.{layer}.self_attn.k_proj.bias",
    "model.layers.{layer}.self_attn.v_proj.bias",
    bias=True,
)

FAMILY = Family(
    "qwen2", ("qwen2",), (*ENDS, *ATTENTION, BIAS, *FEED_FORWARD), settings=lambda _: {"add_qkv_bias": True}
)
