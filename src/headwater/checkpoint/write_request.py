"""What a trainer asks of its writer process, and what the writer answers. Needs no torch.

Both sides send small JSON datagrams over a Unix socket pair; everything long travels as a memfd. Each datagram
carries the id of its save, its attempt and the rank it is about.

    trainer -> writer   save     with descriptors: the request, then each image in the request's order
    writer -> trainer   alive    every half second while a save is being written
                        committed, failed
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headwater.checkpoint.manifest import ChunkEntry

MAX_DATAGRAM = 1 << 16
_MAX_FDS = 250
_NAMED_CHUNKS = 5


@dataclass(frozen=True)
class WriteRequest:
    """All that an attempt needs besides the images.

    structure: of the chunks of each image, as `encode_structure` makes it. digests: live ones, of all chunks in that
    order. images: path and bytes of each file whose image is staged. small: path and content of the other files.
    readback: whether to read all of it from the disk again before the commit. world: how many ranks save together;
    then all have the same `save`. vote_timeout_s: how long rank 0 waits for the others' votes. refusal: why this rank
    has nothing to write, which is to be told to the others.
    """

    save: str
    rank: int
    step: int
    run_id: str
    weight_version: int
    model_identity: str
    saved_at_ns: int
    readback: bool
    structure: tuple[bytes, ...]
    digests: tuple[int, ...]
    images: tuple[tuple[str, int], ...]
    small: dict[str, bytes] = field(default_factory=dict)
    world: int = 1
    vote_timeout_s: float = 0.0
    refusal: str | None = None

    @property
    def chunks(self) -> tuple[ChunkEntry, ...]:
        """With their live digests."""
        items = [item for part in self.structure for item in json.loads(part)]
        return tuple(_chunk(item, digest) for item, digest in zip(items, self.digests, strict=True))

    def to_memfd(self, fd: int) -> int:
        """Write it to an empty file: JSON, then what is long. Returns the length of the JSON part. Raises OSError."""
        document: dict[str, Any] = {key: getattr(self, key) for key in _PLAIN_FIELDS}
        document["images"] = self.images
        document["structure"] = [len(part) for part in self.structure]
        document["digests"] = len(self.digests)
        document["small"] = {path: len(data) for path, data in self.small.items()}
        text = json.dumps(document).encode()
        with open(os.dup(fd), "wb") as file:
            file.write(text)
            for data in (*self.structure, np.array(self.digests, _U64).tobytes(), *self.small.values()):
                file.write(data)
        return len(text)

    @classmethod
    def from_memfd(cls, fd: int, json_bytes: int) -> WriteRequest:
        """The inverse of `to_memfd`."""
        document = json.loads(os.pread(fd, json_bytes, 0))
        position = json_bytes

        def take(nbytes: int) -> bytes:
            nonlocal position
            data = os.pread(fd, nbytes, position)
            position += nbytes
            return data

        return cls(
            **{key: document[key] for key in _PLAIN_FIELDS},
            images=tuple((path, size) for path, size in document["images"]),
            structure=tuple(take(nbytes) for nbytes in document["structure"]),
            digests=tuple(np.frombuffer(take(document["digests"] * _U64.itemsize), _U64).tolist()),
            small={path: take(nbytes) for path, nbytes in document["small"].items()},
        )


def encode_structure(chunks: Iterable[ChunkEntry]) -> bytes:
    """What stays from save to save of chunks: all but their digests."""
    return json.dumps([{k: v for k, v in vars(chunk).items() if k != "digest"} for chunk in chunks]).encode()


def _chunk(item: dict[str, Any], digest: int) -> ChunkEntry:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
    return ChunkEntry(**fields, digest=digest)


_U64 = np.dtype("<u8")
_IDENTITY_FIELDS = ("save", "rank", "step", "run_id", "weight_version", "model_identity", "saved_at_ns")
_PLAIN_FIELDS = (*_IDENTITY_FIELDS, "readback", "world", "vote_timeout_s", "refusal")


def send(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """One datagram. Raises OSError, TimeoutError included."""
    socket.send_fds(channel, [json.dumps(message).encode()], fds)


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One datagram and its descriptors, which are the caller's to close; None where the other side has ended."""
    data, fds, _, _ = socket.recv_fds(channel, MAX_DATAGRAM, _MAX_FDS)
    return (json.loads(data) if data else None), list(fds)


def difference_text(folder: Path, differing: Sequence[str]) -> str:
    """The one line for a save whose bytes are not those of the live tensors. differing: component and chunk names."""
    return (
        f"the checkpoint {folder.name} does not hold what the live tensors held, so it was removed: {listed(differing)}"
    )


def listed(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - _NAMED_CHUNKS} more" if len(names) > _NAMED_CHUNKS else ""
    return f"{', '.join(names[:_NAMED_CHUNKS])}{more}"
