"""Megatron's state leaves its device and comes back in the very same storages, of which many tensors are views.

Parameters, gradients and their shards are views of Megatron's flat buffers, so no tensor may be given other storage:
storages are emptied and filled again. Whoever reads them meanwhile reads from the host.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

from headwater.checkpoint.collector import collector_paused
from headwater.checkpoint.host_buffer import HostBuffer
from headwater.checkpoint.host_copies import HostImage
from headwater.errors import UserError

_ALIGNMENT = 64


class StorageParking:
    """Host memory for the storages of one owner, who passes its fence first. what: names them in an error."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._buffer = HostBuffer(Path(tempfile.gettempdir()))
        self._parked: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        weakref.finalize(
            self, self._buffer.close
        )  # memory that goes while it is page-locked would refuse its successor

    @property
    def occupied(self) -> bool:
        """Whether the storages are here."""
        return bool(self._parked)

    @collector_paused()
    @torch.no_grad()
    def park(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy their storages to the host and empty them. Raises UserError where the host has no memory for them."""
        if self._parked:
            return
        storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors) if s.nbytes()}
        places, size = [], 0
        for storage in storages.values():
            places.append(size)
            size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        if not storages:
            return
        try:
            self._buffer.reserve(size, pin=any(storage.device.type == "cuda" for storage in storages.values()))
        except OSError as error:
            raise UserError(f"no host memory to offload {self._what}, {size:,} bytes ({error.strerror})") from error
        memory = HostImage(self._buffer.view(size))
        for begin, (key, storage) in zip(places, storages.items(), strict=True):
            copy = memory.tensor(begin, torch.uint8, (storage.nbytes(),))
            self._parked[key] = storage, copy.copy_(_bytes(storage), non_blocking=True)
        _synchronize(storages.values())
        for storage in storages.values():
            storage.resize_(0)

    @collector_paused()
    @torch.no_grad()
    def bring_back(self) -> None:
        """Fill the storages again."""
        for storage, copy in self._parked.values():
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy, non_blocking=True)
        _synchronize(storage for storage, _ in self._parked.values())
        self._parked = {}

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, where its storage is away as it is on the host."""
        found = self._parked.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        whole = found[1][: len(found[1]) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        offset = whole.storage_offset() + tensor.storage_offset()
        return whole.as_strided(tensor.shape, tensor.stride(), offset)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),))


def _synchronize(storages: Iterable[torch.UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
