"""A key-value cache whose memory is taken once, for any transformers model with plain attention layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, [B, H, capacity, D], written in place.

    A growing cache copies all it holds for each new token. `capacity` is the most tokens a row may hold.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self._length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            batch, heads, _, dim = key_states.shape
            self._keys = key_states.new_empty(batch, heads, self.capacity, dim)
            self._values = value_states.new_empty(batch, heads, self.capacity, value_states.shape[-1])
        end = self._length + key_states.shape[-2]
        self._keys[:, :, self._length : end] = key_states
        self._values[:, :, self._length : end] = value_states
        self._length = end
        self._expose()
        return self.keys, self.values  # pyright: ignore[reportReturnType]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Make row i what row `indices[i]` was; rows may be repeated or left out."""
        self._keys = self._select(self._keys, indices)
        self._values = self._select(self._values, indices)
        self._expose()

    def _select(self, buffer: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        selected = buffer.new_empty(len(indices), *buffer.shape[1:])
        selected[:, :, : self._length] = buffer[:, :, : self._length][indices]
        return selected

    def _expose(self) -> None:
        self.keys = self._keys[:, :, : self._length]
        self.values = self._values[:, :, : self._length]


def make_cache(config: PreTrainedConfig, capacity: int) -> Cache:
    """A cache for `capacity` tokens a row; the model's own kind where its layers are not all plain attention."""
    own = DynamicCache(config=config)
    if own.layers and all(type(layer) is DynamicLayer for layer in own.layers):
        return Cache(layers=[PreallocatedLayer(capacity) for _ in own.layers])
    return own
