"""The unit of a checkpoint: a box of a named global tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

_ORIGINS = [(0,) * dimensions for dimensions in range(65)]  # torch has at most 64


class Chunk(NamedTuple):
    """A live tensor and where it sits in the global one.

    name: Hugging Face parameter name for a weight; `optimizer.state.<state>.<parameter name>` for
        optimizer state, with <state> one of param (fp32 master weights), exp_avg, exp_avg_sq, step.
    tensor: the local box, on any device, with any strides. Never cached between saves.
    global_shape: shape of the whole tensor.
    offset: index of the box's first element in the whole tensor, one number a dimension.
    changes_in_forward: whether a forward pass writes it, as it does running statistics; others change only behind
        their engine's fence.
    """

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    changes_in_forward: bool = False

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor, *, changes_in_forward: bool = False) -> Chunk:
        """A chunk that is the whole tensor."""
        shape = tuple(tensor.shape)
        return cls(name, tensor, shape, _ORIGINS[len(shape)], changes_in_forward)
