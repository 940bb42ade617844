"""A save as NVRx is given it: tensors on a device one by one, and all that lies on the host in blocks of our own.

The writer process opens a device tensor's storage in place. Whatever else there is, a scalar on the host, a tensor
whose elements are not in order, the state of a model that was offloaded, is copied into blocks of shared memory at the
call: training may write it right after, and a save that is lost can be repeated from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.preflight import size_text
from headwater.checkpoint.strategies.nvrx_agent import ItemKey
from headwater.errors import UserError

_BLOCK_BYTES = 256 << 20
_ALIGNMENT = 16
_COPIES = 2  # a block, and the one that some versions of NVRx make of it
_SHARED_MEMORY = "/dev/shm"
Identity = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Place:
    """Where a chunk lies: in which item, and its range of bytes there."""

    item: ItemKey
    begin: int
    end: int


@dataclass
class Items:
    """tensors: of each item, live ones of a device and the blocks of the host. places: of each chunk, in order.

    identity: which memory the live ones are, so that whoever has handles to it can tell that they are out of date.
    """

    tensors: dict[ItemKey, torch.Tensor] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    identity: Identity = ()

    @property
    def device(self) -> int | None:
        """Index of the CUDA device of the live tensors, None where there is none."""
        return next((tensor.device.index for tensor in self.tensors.values() if tensor.is_cuda), None)

    def drop_live(self) -> None:
        """Let go of the tensors of training."""
        self.tensors = {key: tensor for key, tensor in self.tensors.items() if not tensor.is_cuda}

    def drop(self) -> None:
        """Let go of everything."""
        self.tensors = {}

    def plan(self) -> SavePlan:
        """For NVRx's writer."""
        return SavePlan([_write_item(key, tensor) for key, tensor in self.tensors.items()])

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        """As a planner does for NVRx's writer."""
        offset = item.index.offset
        return self.tensors[item.index.fqn, tuple(offset) if offset is not None else ()]

    def parts(self) -> dict[ItemKey, list[tuple[int, int]]]:
        """Of each item, the range of each chunk in its bytes, in the order of the chunks."""
        found: dict[ItemKey, list[tuple[int, int]]] = {key: [] for key in self.tensors}
        for place in self.places:
            found[place.item].append((place.begin, place.end))
        return found


def make_items(
    chunks: Mapping[str, Sequence[Chunk]], *, device_through_host: bool = False, kept_on_host: int = 0
) -> Items:
    """Copies what is on the host. chunks: of each component, checked, and their digests taken. device_through_host:
    whether NVRx will copy what is on a device into shared memory too; it has `kept_on_host` bytes for that already.

    Raises UserError where shared memory is short.
    """
    items, on_host = Items(), list[tuple[int, Chunk]]()
    identity = []
    for component, parts in chunks.items():
        for chunk in parts:
            tensor = chunk.tensor.detach()
            if tensor.is_cuda and tensor.is_contiguous() and tensor.numel():
                key = (f"{component}.{chunk.name}", chunk.offset)
                items.tensors[key] = tensor
                items.places.append(Place(key, 0, tensor.nbytes))
                identity.append((*key, *storage_identity(tensor)))
            else:
                on_host.append((len(items.places), chunk))
                items.places.append(Place(("", ()), 0, 0))
    items.identity = tuple(identity)
    on_device = sum(tensor.nbytes for tensor in items.tensors.values())
    through_host = max(0, on_device - kept_on_host) if device_through_host else 0
    _require_shared_memory(_COPIES * sum(chunk.tensor.nbytes for _, chunk in on_host) + through_host)
    _copy_to_blocks(items, on_host)
    return items


def storage_identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which memory a tensor is, and how it reads it."""
    storage = tensor.untyped_storage()
    memory = (tensor.device, storage.data_ptr(), storage.nbytes(), tensor.storage_offset())
    return (*memory, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _copy_to_blocks(items: Items, chunks: Sequence[tuple[int, Chunk]]) -> None:
    """chunks: each with its index among all. Several blocks, which NVRx writes at once."""
    blocks: list[list[tuple[int, Chunk, int]]] = [[]]
    sizes, used = [0], 0
    for index, chunk in chunks:
        if used and used + chunk.tensor.nbytes > _BLOCK_BYTES:
            blocks.append([])
            sizes.append(0)
            used = 0
        blocks[-1].append((index, chunk, used))
        sizes[-1] = used + chunk.tensor.nbytes
        used = -(-sizes[-1] // _ALIGNMENT) * _ALIGNMENT
    for number, (members, size) in enumerate(zip(blocks, sizes, strict=True)):
        if not members and items.tensors:
            continue  # NVRx is given something to write, also where there is no tensor at all
        block = torch.empty(max(size, 1), dtype=torch.uint8, device="cpu").share_memory_()
        key = (f"host-{number:05d}", (0,))
        items.tensors[key] = block
        for index, chunk, begin in members:
            tensor = chunk.tensor.detach()
            end = begin + tensor.nbytes
            items.places[index] = Place(key, begin, end)
            if tensor.numel():
                block[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _require_shared_memory(needed: int) -> None:
    """Where it is short, the kernel does not refuse it: it kills the process that touches it."""
    try:
        system = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < needed:
        raise UserError(
            f"NVRx is given {size_text(needed)} of host memory through {_SHARED_MEMORY}, where {size_text(free)} is "
            "free: enlarge it, or set checkpointing.strategy=native, which does not need it"
        )


def _write_item(key: ItemKey, tensor: torch.Tensor) -> WriteItem:
    name, offset = key
    sizes = tensor.size()
    return WriteItem(
        index=MetadataIndex(name, torch.Size(offset)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offset), sizes=sizes),
            properties=TensorProperties(dtype=tensor.dtype),
            size=sizes,
        ),
    )
