"""Tensors that leave their device for a while, into page-locked host memory, and come back as the same objects.

    park:        what a save has staged already is taken as it is ──> the rest is copied ──> the device's memory is free
    bring_back:  new memory on the device, filled from the host

A tensor keeps its identity: whoever holds a parameter or a moment holds it still, only its storage is another one.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from headwater.checkpoint.collector import collector_paused
from headwater.checkpoint.fence import Staged
from headwater.checkpoint.host_buffer import HostBuffer
from headwater.checkpoint.host_copies import HostCopies, HostImage
from headwater.checkpoint.staging import Staging
from headwater.errors import UserError

_ALIGNMENT = 64


@dataclass(frozen=True)
class _Parked:
    """A tensor that is on the host, and what its storage was like on the device."""

    tensor: torch.Tensor
    device: torch.device
    stride: tuple[int, ...]


class Parking:
    """Host memory for the tensors of one owner, who passes its fence first.

    The memory is kept for the next time. what: names the tensors in an error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._buffer = HostBuffer(Path(tempfile.gettempdir()))
        self._parked: list[_Parked] = []
        self._let_go: list[Callable[[], None]] = []
        weakref.finalize(self, _free, self._buffer, self._let_go)

    @property
    def occupied(self) -> bool:
        """Whether the tensors are here."""
        return bool(self._parked)

    @collector_paused()
    def park(
        self,
        tensors: Iterable[torch.Tensor],
        passed: Sequence[Staged] = (),
        gradients: Iterable[torch.Tensor] = (),
    ) -> int:
        """Move tensors to the host and free their storage; returns the bytes that had to be copied for it.

        passed: what the fence has just waited for; what of it holds a tensor's value is used in place of a copy.
        gradients: moved as well and always copied, since they are allocated without the fence, maybe where a tensor was
        when it was saved that has left since.
        Does nothing where they are here already. Raises UserError where the host has no memory for them.
        """
        if self._parked:
            return 0
        saved = list({id(tensor): tensor for tensor in tensors if tensor.numel()}.values())
        distinct = [*saved, *(gradient for gradient in gradients if gradient.numel())]
        images = [staging.copies for staging in passed if isinstance(staging, Staging) and staging.copies]
        with ExitStack() as undoing:
            undoing.callback(self._let_all_go)
            on_host = self._adopt(saved, images)
            missing = [tensor for tensor in distinct if id(tensor) not in on_host]
            on_host |= zip(map(id, missing), self._copy(missing), strict=True)
            undoing.pop_all()
        self._parked = [_Parked(tensor, tensor.device, tensor.stride()) for tensor in distinct]
        for tensor in distinct:
            tensor.data = on_host[id(tensor)]
        return sum(tensor.nbytes for tensor in missing)

    def _adopt(self, tensors: Sequence[torch.Tensor], images: Sequence[HostCopies]) -> dict[int, torch.Tensor]:
        """What saves have staged of the tensors, by id."""
        found: dict[int, torch.Tensor] = {}
        for image in reversed(images):
            let_go = image.keep()
            if let_go is None:
                continue
            here = image.of(tensor for tensor in tensors if id(tensor) not in found)
            found |= here
            if here:
                self._let_go.append(let_go)
            else:
                let_go()
        return found

    def _copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        places, size = [], 0
        for tensor in tensors:
            places.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not tensors:
            return []
        try:
            self._buffer.reserve(size, pin=any(tensor.is_cuda for tensor in tensors))
        except OSError as error:
            raise UserError(f"no host memory to offload {self._what}, {size:,} bytes ({error.strerror})") from error
        memory, copies = HostImage(self._buffer.view(size)), []
        with torch.no_grad():
            for begin, tensor in zip(places, tensors, strict=True):
                copies.append(memory.tensor(begin, tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True))
        _synchronize(tensor.device for tensor in tensors)
        return copies

    @collector_paused()
    def bring_back(self) -> None:
        """Move the tensors back to where they were, laid out as they were."""
        with torch.no_grad():
            back = [
                torch.empty_strided(parked.tensor.shape, parked.stride, dtype=parked.tensor.dtype, device=parked.device)
                for parked in self._parked
            ]  # all of it first: where the device has no room, all stay where they are
            for there, parked in zip(back, self._parked, strict=True):
                there.copy_(parked.tensor, non_blocking=True)
            _synchronize(parked.device for parked in self._parked)
            for there, parked in zip(back, self._parked, strict=True):
                parked.tensor.data = there
        self._parked = []
        self._let_all_go()

    def _let_all_go(self) -> None:
        while self._let_go:
            self._let_go.pop()()


def _free(buffer: HostBuffer, let_go: list[Callable[[], None]]) -> None:
    """When the owner is gone."""
    while let_go:
        let_go.pop()()
    buffer.close()


def _synchronize(devices: Iterable[torch.device]) -> None:
    """Return when what was asked of them is done, since a copy is not waited for otherwise."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
