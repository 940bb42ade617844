"""What a rank says about a save, as a file that is never taken for another's nor believed when torn. Needs no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.checkpoint import preflight
from headwater.checkpoint.byte_digest import digest_bytes
from headwater.checkpoint.manifest import CorruptCheckpointError, FileEntry, Manifest
from headwater.checkpoint.write_request import WriteRequest
from headwater.errors import HeadwaterError, UserError

VOTES_NAME = ".votes"


@dataclass(frozen=True)
class Refusal:
    """Why a save is not committed. by: the rank that refused, None for this one. errno: where the system refused."""

    by: int | None
    errno: int | None
    text: str


class RefusedError(HeadwaterError):
    """The save was refused by another rank, or on its behalf."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


def refusal_of(error: Exception) -> Refusal:
    """What is told of an error: to the trainer, and to other ranks."""
    if isinstance(error, RefusedError):
        return error.refusal
    if isinstance(error, OSError):
        return Refusal(None, error.errno, error.strerror or str(error))
    name = "" if isinstance(error, HeadwaterError) else f"{type(error).__name__}: "
    return Refusal(None, None, f"{name}{error}"[:4000])


def error_of(refusal: Refusal, step: int, root: Path) -> HeadwaterError:
    """What a trainer is told of its save of a step into `root`: the file system's refusals with their remedy."""
    rank = "" if refusal.by is None else f"rank {refusal.by}: "
    if refusal.errno is None:
        return HeadwaterError(f"{rank}{refusal.text}")
    cause = preflight.explain(OSError(refusal.errno, refusal.text))
    return UserError(f"{rank}saving step {step} to {root} failed: {cause}")


@dataclass(frozen=True)
class Vote:
    """What one rank has to say about one save.

    save: the save's token. attempt: of its writer. errno, refused: why the rank refuses, or None. part: otherwise, the
    rank's chunks, with the digests of what was written, which are those of the live tensors, and its files.
    """

    save: str
    rank: int
    world: int
    attempt: int
    errno: int | None
    refused: str | None
    part: Manifest | None

    def to_bytes(self) -> bytes:
        header = {key: value for key, value in vars(self).items() if key != "part"}
        return seal(header, self.part.to_json() if self.part is not None else "")

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> Vote:
        """The inverse. Raises CorruptCheckpointError for a single byte that `to_bytes` would not have written."""
        try:
            header, body = unseal(data)
            vote = cls(**header, part=Manifest.from_json(body, source) if body else None)
            if vote.to_bytes() != data or (vote.refused is None) == (vote.part is None):
                raise ValueError("it is not what a rank writes")
        except (ValueError, TypeError) as error:
            raise CorruptCheckpointError(f"{source}: the vote is torn or was altered ({error})") from None
        return vote


def seal(header: Mapping[str, Any], body: str) -> bytes:
    """A line of JSON with a checksum of everything, then the body."""
    checksum = digest_bytes(f"{json.dumps(header)}\n{body}".encode())
    return f"{json.dumps({**header, 'checksum': f'{checksum:016x}'})}\n{body}".encode()


def unseal(data: bytes) -> tuple[dict[str, Any], str]:
    """The inverse. Raises ValueError for what `seal` did not write."""
    line, _, body = data.decode().partition("\n")
    header = json.loads(line)
    if not isinstance(header, dict):
        raise ValueError("no object")
    header.pop("checksum", None)
    if seal(header, body) != data:
        raise ValueError("its checksum does not hold")
    return header, body


def part_manifest(request: WriteRequest, save_id: str, files: Iterable[FileEntry]) -> Manifest:
    """The manifest of what one rank wrote: all of it, where it is alone."""
    return Manifest(
        run_id=request.run_id,
        save_id=save_id,
        step=request.step,
        weight_version=request.weight_version,
        model_identity=request.model_identity,
        saved_at_ns=request.saved_at_ns,
        chunks=request.chunks,
        files=tuple(files),
    )


def clear(root: Path) -> None:
    """Remove what is left of votes. Nobody may be saving."""
    shutil.rmtree(root / VOTES_NAME, ignore_errors=True)


def vote_name(rank: int) -> str:
    """Of the file with a rank's vote."""
    return f"rank-{rank:05d}.json"
