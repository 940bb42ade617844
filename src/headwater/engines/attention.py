"""Attention for grouped-query models without repeating keys and values.

Scaled dot-product attention wants as many key heads as query heads, so the usual path copies each key
and value head once per query head of its group, for every layer and every decoded token. A decoding
step has one query a head; the queries of one group can therefore stand in the query-length dimension
instead, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "headwater_sdpa"

# Arguments with which some model families change attention itself; those take the common path.
_SPECIAL = ("position_bias", "softcap", "s_aux", "cache")


def grouped_query_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one decoded token a row; everything else goes to transformers' own function.

    query [B, Hq, 1, D], key and value [B, Hkv, L, D], attention_mask broadcastable to [B, 1, 1, L] or
    None. Returns [B, 1, Hq, D] and no weights, as transformers' attention interface asks.
    """
    batch, query_heads, query_length, _ = query.shape
    key_heads = key.shape[1]
    if query_length != 1 or dropout or any(kwargs.get(name) is not None for name in _SPECIAL):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)  # pyright: ignore[reportReturnType]
    grouped = query.reshape(batch, key_heads, query_heads // key_heads, -1)
    output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, query_heads, -1), None


def register_attention() -> str:
    """Make the attention known to transformers; returns the name to load a model with."""
    AttentionInterface.register(ATTENTION, grouped_query_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    return ATTENTION
