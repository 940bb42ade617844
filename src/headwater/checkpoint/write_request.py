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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headwater.checkpoint.manifest import ChunkEntry

MAX_DATAGRAM = 1 << 16
_MAX_FDS = 250
_NAMED_CHUNKS = 5


@dataclass(frozen=True)
class WriteRequest:
    """All that an attempt needs besides the images. Goes into a memfd: this as JSON, then the small files' bytes.

    chunks: with the live digests. images: path and bytes of each file whose image is staged. small: path and
    content of the other files.
    """

    save: str
    rank: int
    step: int
    run_id: str
    weight_version: int
    model_identity: str
    saved_at_ns: int
    chunks: tuple[ChunkEntry, ...]
    images: tuple[tuple[str, int], ...]
    small: dict[str, bytes] = field(default_factory=dict)

    def to_memfd(self, fd: int) -> int:
        """Write it to an empty file; returns the length of its JSON part. Raises OSError."""
        document = {key: getattr(self, key) for key in _PLAIN_FIELDS}
        document["chunks"] = [asdict(chunk) | {"digest": f"{chunk.digest:016x}"} for chunk in self.chunks]
        document["images"] = self.images
        document["small"] = {path: len(data) for path, data in self.small.items()}
        text = json.dumps(document).encode()
        with open(os.dup(fd), "wb") as file:
            file.write(text)
            for data in self.small.values():
                file.write(data)
        return len(text)

    @classmethod
    def from_memfd(cls, fd: int, json_bytes: int) -> WriteRequest:
        """The inverse of `to_memfd`."""
        document = json.loads(os.pread(fd, json_bytes, 0))
        small, position = {}, json_bytes
        for path, nbytes in document["small"].items():
            small[path] = os.pread(fd, nbytes, position)
            position += nbytes
        chunks = tuple(map(_chunk, document["chunks"]))
        images = tuple((path, size) for path, size in document["images"])
        return cls(**{key: document[key] for key in _PLAIN_FIELDS}, chunks=chunks, images=images, small=small)


def _chunk(item: dict[str, Any]) -> ChunkEntry:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
    fields["digest"] = int(item["digest"], 16)
    return ChunkEntry(**fields)


_PLAIN_FIELDS = ("save", "rank", "step", "run_id", "weight_version", "model_identity", "saved_at_ns")


def send(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """One datagram. Raises OSError, TimeoutError included."""
    socket.send_fds(channel, [json.dumps(message).encode()], fds)


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One datagram and its descriptors, which are the caller's to close; None where the other side has ended."""
    data, fds, _, _ = socket.recv_fds(channel, MAX_DATAGRAM, _MAX_FDS)
    return (json.loads(data) if data else None), list(fds)


def difference_text(folder: Path, differing: Sequence[str]) -> str:
    """The one line for a save whose bytes are not those of the live tensors. differing: component and chunk names."""
    more = f" and {len(differing) - _NAMED_CHUNKS} more" if len(differing) > _NAMED_CHUNKS else ""
    return (
        f"the checkpoint {folder.name} does not hold what the live tensors held, so it was removed: "
        f"{', '.join(differing[:_NAMED_CHUNKS])}{more}"
    )
