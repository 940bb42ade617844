"""What megatron-core's plain modules refuse and training here needs: packed masks, context and sequence parallelism.

Convention of Megatron: hidden states are [S, B, H], S the positions that this rank has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from headwater.engines.generate.kv_cache import PreallocatedLayer
from headwater.engines.torch.value import ValueHead


class MaskedAttention(MegatronModule):
    """torch's scaled dot-product attention under a mask of which a row is packed from several sequences.

    With context parallelism each rank has a part of the positions of every row: its queries look at the keys and values
    of all ranks, which are gathered. The mask is [B, 1, S, L] bool, True where a query may look: S positions of this
    rank, L of the whole row, in the order of the ranks.

    While tokens are generated, `cache` holds the keys and values of the L positions so far, of which S are new. Each
    rank has whole rows then, of its own.
    """

    cache: PreallocatedLayer | None = None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._context_group = pg_collection.cp
        self._scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """query [S, B, heads, D], key and value [S, B, groups, D] to [S, B, heads * D]."""
        if self._context_group.size() > 1 and self.cache is None:
            key, value = _Gather.apply(torch.stack([key, value], 1), self._context_group).unbind(1)  # pyright: ignore
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self.cache is not None:
            key, value = self.cache.update(key, value)
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=self._scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).flatten(2).contiguous()


class _Gather(torch.autograd.Function):
    """Concatenate over ranks along dimension 0; gradients are summed over ranks and cut again."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        whole = own.new_empty((own.shape[0] * group.size(), *own.shape[1:]))
        dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        own = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019, arXiv:1910.07467), for sequence parallelism too.

    There each rank sees a part of the positions, and Megatron adds up the gradients of weights that say so.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self._eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computed in fp32, as transformers does."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(hidden.dtype)


class RotaryAtPositions(torch.nn.Module):
    """Angles of rotary position embeddings (Su et al., 2021, arXiv:2104.09864) at the positions given.

    Positions of a packed row begin anew with each sequence; Megatron's own module knows rows from 0 on alone. It stands
    in the place of its multimodal one, which is the one that is told positions.
    """

    def __init__(self, inverse_frequencies: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)

    def forward(self, position_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """position_ids [B, S] to fp32 angles [S, B, 1, D]."""
        angles = position_ids.t()[..., None].float() * self.inverse_frequencies.to(position_ids.device)
        return torch.cat([angles, angles], -1)[:, :, None]


class MegatronValueHead(ValueHead):
    """The value head of the torch backend, called as Megatron calls its output layer. The same on every rank."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:  # pyright: ignore
        """[S, B, H] to [S, B, 1] fp32, and no bias that were still to be added."""
        return super().forward(hidden), None
