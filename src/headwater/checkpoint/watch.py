"""Sees a live tensor being written in place or moved, unless it is done behind torch's back."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch

_VERSION = attrgetter("_version")


class Watch:
    """Notes the tensors given, in a fraction of a microsecond each."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._before = _state(self._tensors)

    def changed(self) -> list[torch.Tensor]:
        """Those that are not what they were when this was made."""
        before, now = (zip(*state, strict=True) for state in (self._before, _state(self._tensors)))
        return [tensor for tensor, was, is_ in zip(self._tensors, before, now, strict=True) if was != is_]

    @property
    def before(self) -> tuple[list[int], list[int]]:
        """Versions and addresses at the time that this was made."""
        return self._before

    def clear(self) -> None:
        """Let go of the tensors."""
        self._tensors, self._before = [], ([], [])


def stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """How often a tensor was written, and its address."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _state(tensors: list[torch.Tensor]) -> tuple[list[int], list[int]]:
    """How often each was written, and its address."""
    try:
        versions = list(map(_VERSION, tensors))
    except RuntimeError:  # tensors made in inference mode count no versions
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    return versions, list(map(torch.Tensor.data_ptr, tensors))
