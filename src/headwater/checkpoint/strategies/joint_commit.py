"""The end of a save whose files someone else wrote: into the checkpoint's folder, with other ranks', and committed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headwater.checkpoint.ballot import Ballot
from headwater.checkpoint.commit import commit, committed, discard
from headwater.checkpoint.manifest import ChunkEntry, FileEntry, Manifest, validate
from headwater.checkpoint.ranks import SAVE_ID_DIGITS, Ranks
from headwater.checkpoint.readback import read_back
from headwater.checkpoint.save_order import SaveOrder
from headwater.checkpoint.votes import error_of, part_manifest, refusal_of
from headwater.checkpoint.write_request import WriteRequest, encode_structure
from headwater.checkpoint.writer import write_bytes
from headwater.errors import HeadwaterError


@dataclass
class Written:
    """What one rank has for a save. folder: where its files are, on the file system of the checkpoints.

    files: name in there, size and checksum; they are synced. chunks: with their live digests, which are those of the
    files, under the paths of the checkpoint. into: folder of the checkpoint that the files go to.
    """

    folder: Path
    files: Mapping[str, tuple[int, int]]
    chunks: Sequence[ChunkEntry]
    into: str


@dataclass
class JointCommit:
    """One rank's way to the commit of one save. token: of the save, see `Ranks.save_token`."""

    root: Path
    ranks: Ranks
    vote_timeout_s: float
    token: str
    order: SaveOrder
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        return self.root / f"step_{self.order.step:06d}-{self.token[:SAVE_ID_DIGITS]}"

    def commit(self, written: Written) -> None:
        """Return once it is committed, and what that took is in `measured`.

        Raises UserError when the file system refuses, HeadwaterError when another rank does; nothing is left behind
        then.
        """
        started = time.perf_counter()
        request = self._request(written, None)
        if self.ranks.world > 1:
            self._commit_with_others(request, written)
        else:
            self._commit_alone(request, written)
        self.measured["commit_s"] = time.perf_counter() - started - self.measured["readback_s"]

    def refuse(self, error: Exception) -> None:
        """Let the other ranks know that this one has nothing to commit."""
        if self.ranks.world > 1:
            ballot = Ballot(self.folder, self._request(Written(self.root, {}, (), ""), str(error)), 1)
            try:
                ballot.join()
            except (OSError, HeadwaterError):
                return  # it is over
            ballot.give_up(refusal_of(error))

    def _request(self, written: Written, refusal: str | None) -> WriteRequest:
        order, chunks = self.order, written.chunks
        return WriteRequest(
            save=self.token,
            rank=self.ranks.rank,
            step=order.step,
            run_id=order.run_id,
            weight_version=order.weight_version,
            model_identity=order.model_identity,
            saved_at_ns=order.saved_at_ns,
            readback=order.readback,
            structure=(encode_structure(chunks),),
            digests=tuple(chunk.digest for chunk in chunks),
            images=tuple((f"{written.into}/{name}", size) for name, (size, _) in written.files.items()),
            small=order.small_files,
            world=self.ranks.world,
            vote_timeout_s=self.vote_timeout_s,
            refusal=refusal,
        )

    def _commit_alone(self, request: WriteRequest, written: Written) -> None:
        made = False
        try:
            self.folder.mkdir()
            made = True
            part = self._put(request, written)
            validate(part, str(self.folder))
            commit(self.folder, part)
        except Exception as error:
            if made and not committed(self.folder):
                discard(self.folder)
            raise error_of(refusal_of(error), self.order.step, self.root) from None

    def _commit_with_others(self, request: WriteRequest, written: Written) -> None:
        ballot = Ballot(self.folder, request, 1)
        try:
            ballot.join()
            ballot.vote(self._put(request, written))
            ballot.settle()
        except Exception as error:
            raise error_of(ballot.give_up(refusal_of(error)), self.order.step, self.root) from None

    def _put(self, request: WriteRequest, written: Written) -> Manifest:
        """Move and write this rank's files into the checkpoint's folder, which is there."""
        if written.files:
            (self.folder / written.into).mkdir(exist_ok=True)
        files = []
        for name, (size, checksum) in written.files.items():
            path = f"{written.into}/{name}"
            os.rename(written.folder / name, self.folder / path)
            files.append(FileEntry(path, size, checksum))
        for path, data in request.small.items():
            target = self.folder / path
            target.parent.mkdir(exist_ok=True)
            file = write_bytes(target, data)
            files.append(FileEntry(path, file.size, file.checksum))
        self.measured["readback_s"] = read_back(self.folder, files, request.chunks) if request.readback else 0.0
        self.measured["bytes"] = float(sum(file.size for file in files))
        return part_manifest(request, self.token[:SAVE_ID_DIGITS], files)
