"""Llama, SmolLM2, and others that call themselves `llama`."""

from headwater.bridge.family import Family
from headwater.bridge.pieces import Copied, GateUp, Output, QueryKeyValue, Rule, Vocabulary

_MEGATRON = "decoder.layers.{layer}."
_HUGGING_FACE = "model.layers.{layer}."
_ATTENTION = _HUGGING_FACE + "self_attn."

ENDS: tuple[Rule, ...] = (
    Vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    Vocabulary("output_layer.weight", "lm_head.weight"),
    Copied("decoder.final_layernorm.weight", "model.norm.weight"),
)
"""Embedding, output and the norm before it."""

ATTENTION: tuple[Rule, ...] = (
    Copied(_MEGATRON + "input_layernorm.weight", _HUGGING_FACE + "input_layernorm.weight"),
    Copied(_MEGATRON + "pre_mlp_layernorm.weight", _HUGGING_FACE + "post_attention_layernorm.weight"),
    QueryKeyValue(
        _MEGATRON + "self_attention.linear_qkv.weight",
        _ATTENTION + "q_proj.weight",
        _ATTENTION + "k_proj.weight",
        _ATTENTION + "v_proj.weight",
    ),
    Output(_MEGATRON + "self_attention.linear_proj.weight", _ATTENTION + "o_proj.weight", "heads"),
)
"""Attention of a layer, and its norms."""

FEED_FORWARD: tuple[Rule, ...] = (
    GateUp(
        _MEGATRON + "mlp.linear_fc1.weight",
        _HUGGING_FACE + "mlp.gate_proj.weight",
        _HUGGING_FACE + "mlp.up_proj.weight",
        "feed_forward",
    ),
    Output(_MEGATRON + "mlp.linear_fc2.weight", _HUGGING_FACE + "mlp.down_proj.weight", "feed_forward"),
)
"""A dense feed-forward layer."""

FAMILY = Family("llama", ("llama",), (*ENDS, *ATTENTION, *FEED_FORWARD))
