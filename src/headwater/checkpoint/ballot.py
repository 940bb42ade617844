"""How the writers of several ranks agree on one save: through files, never a collective. Needs no torch.

    writer of rank 0                            writers of the others
    open the save's folders         ──────>     wait for them
    write and prove its files                   write and prove their files
    vote                                        vote
    wait for all votes, put together  <────
    commit, decide                  ──────>     wait for the manifest or the decision

Votes lie beside the checkpoint's folder, in `.votes/step_000010-<save id>/`, for that folder is never changed after its
commit, and before it no vote may go: a rank that finds its own gone would write its files anew. A vote and a decision
appear by a rename and are final. Whoever was killed is started again and goes on from what is there. Where rank 0
refuses, the folder is renamed before it is removed, so that a slower rank cannot write into it any more.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from headwater.checkpoint.commit import commit, committed, discard, sync_folder
from headwater.checkpoint.manifest import MANIFEST_NAME, CorruptCheckpointError, Manifest, validate
from headwater.checkpoint.ranks import is_file_of
from headwater.checkpoint.votes import VOTES_NAME, Refusal, RefusedError, Vote, seal, unseal, vote_name
from headwater.checkpoint.write_request import WriteRequest
from headwater.errors import HeadwaterError

_DECISION_NAME = "decision.json"
_FIRST_POLL_S, _LAST_POLL_S = 0.01, 0.25
_log = logging.getLogger(__name__)


class Ballot:
    """One rank's part in the agreement on one save. Methods raise OSError as the file system does.

    folder: of the checkpoint. attempt: how many writers of this rank were given the save, this one included.
    """

    def __init__(self, folder: Path, request: WriteRequest, attempt: int) -> None:
        self._folder = folder
        self._request = request
        self._attempt = attempt
        self._joined = False
        self._votes = folder.parent / VOTES_NAME / folder.name
        self._decision = self._votes / _DECISION_NAME

    def join(self) -> bool:
        """Open the save, or wait until rank 0 has. Returns whether this rank's files are still to be written.

        Raises RefusedError where the save was refused meanwhile, HeadwaterError where rank 0 does not open it.
        """
        if self._request.rank == 0:
            self._decided()  # by an attempt that did not live to say so
            self._open()
        else:
            self._wait_until(
                lambda: self._votes.is_dir() or committed(self._folder),
                "rank 0 did not begin it: checkpointing.checkpoint_dir has to be one folder that all ranks see",
            )
        self._joined = True
        # In this order: votes go after the commit only, so that where one is gone the commit is seen.
        done = self._read(self._request.rank) is not None or self._settled()
        if done and self._attempt == 1:
            raise self._used_before()
        return not done

    def _open(self) -> None:
        self._votes.parent.mkdir(exist_ok=True)
        self._forget_old()
        again = self._attempt > 1
        try:
            self._folder.mkdir(exist_ok=again)
            self._votes.mkdir(exist_ok=again)
        except FileExistsError:
            raise self._used_before() from None

    def _used_before(self) -> HeadwaterError:
        return HeadwaterError(
            f"{self._folder.name} is there already: each start of the job needs a session that no other had"
        )

    def _forget_old(self) -> None:
        """Of other saves, keep the last one's decision: that one alone may have a rank which has not read it yet."""
        others = [path for path in self._votes.parent.iterdir() if path != self._votes]
        for path in sorted(others, key=lambda path: path.stat().st_mtime_ns)[:-1]:
            shutil.rmtree(path, ignore_errors=True)

    def remove_files(self) -> None:
        """Remove what this rank has written, as an earlier attempt may have."""
        for path in (*(path for path, _ in self._request.images), *self._request.small):
            (self._folder / path).unlink(missing_ok=True)

    def vote(self, part: Manifest) -> None:
        """Vouch for this rank's files, which are written, synced and proven."""
        for inner in {(self._folder / file.path).parent for file in part.files} | {self._folder}:
            sync_folder(inner)
        self._leave(None, None, part)

    def _leave(self, errno: int | None, refused: str | None, part: Manifest | None) -> None:
        request = self._request
        vote = Vote(request.save, request.rank, request.world, self._attempt, errno, refused, part)
        self._put(self._votes / vote_name(request.rank), vote.to_bytes())

    def _put(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f"{path.name}.{self._request.rank}-{self._attempt}.tmp")
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_folder(path.parent)

    def _read(self, rank: int) -> Vote | None:
        """A rank's vote on this very save; None if there is none yet.

        Raises CorruptCheckpointError for one that cannot be believed.
        """
        path = self._votes / vote_name(rank)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        vote, request = Vote.from_bytes(data, str(path)), self._request
        if (vote.save, vote.rank, vote.world) != (request.save, rank, request.world):
            raise CorruptCheckpointError(f"{path}: it is no vote of rank {rank} of {request.world} on this save")
        if vote.part is not None:
            self._check_part(vote.part, rank, str(path))
        return vote

    def _check_part(self, part: Manifest, rank: int, source: str) -> None:
        request = self._request
        for name in ("step", "weight_version", "model_identity"):
            if getattr(part, name) != getattr(request, name):
                raise CorruptCheckpointError(
                    f"{source}: rank {rank} saved {name} {getattr(part, name)}, "
                    f"rank {request.rank} {getattr(request, name)}"
                )
        for file in part.files:
            if rank != 0 and not is_file_of(file.path, rank):
                raise CorruptCheckpointError(f"{source}: {file.path} is no file of rank {rank}")
            try:
                found = os.lstat(self._folder / file.path)
            except OSError as error:
                raise CorruptCheckpointError(f"{source}: {file.path} cannot be read ({error.strerror})") from None
            if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
                raise CorruptCheckpointError(f"{source}: {file.path} is not the file of {file.size} bytes it tells of")

    def settle(self) -> None:
        """Rank 0: put all parts together and commit. The others: wait until it has. Returns once it is committed.

        Raises RefusedError where a rank refuses, HeadwaterError where one does not vote in time or the parts
        contradict each other.
        """
        if self._request.rank:
            self._wait_until(self._settled, "rank 0 neither committed nor refused it", self._sign_of_rank_0)
        else:
            manifest = self._collect()
            (self._folder / f"{MANIFEST_NAME}.tmp").unlink(missing_ok=True)  # of an attempt that was killed
            commit(self._folder, manifest)
            try:
                self._decide(None)
            except OSError as error:  # it is committed all the same, and the others see that too
                _log.warning("the decision to commit %s is not written: %s", self._folder.name, error)

    def _collect(self) -> Manifest:
        """Wait for the vote of every rank. Returns the manifest of all files."""
        request, parts = self._request, dict[int, Manifest]()
        if self._attempt > 1:
            os.utime(self._votes / vote_name(0))  # the others' patience begins again with this rank's
        polls, deadline = _Polls(), time.monotonic() + request.vote_timeout_s
        while True:
            there = set(os.listdir(self._votes))
            for rank in range(request.world):
                if rank not in parts and vote_name(rank) in there and (vote := self._read(rank)) is not None:
                    if vote.part is None:
                        raise RefusedError(Refusal(rank, vote.errno, vote.refused or ""))
                    parts[rank] = vote.part
            if len(parts) == request.world:
                break
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(request.world) if rank not in parts)
                raise HeadwaterError(
                    f"saving step {request.step} failed: rank {missing} did not vote within "
                    f"{request.vote_timeout_s:g} s (checkpointing.vote_timeout_s)"
                )
            polls.sleep()
        ordered = [parts[rank] for rank in range(request.world)]
        merged = replace(
            ordered[0],
            chunks=tuple(chunk for part in ordered for chunk in part.chunks),
            files=tuple(file for part in ordered for file in part.files),
        )
        validate(merged, str(self._folder))
        return merged

    def _settled(self) -> bool:
        """Whether the save is committed. Raises RefusedError where it never will be."""
        if self._decided():  # the folder may be pruned by now
            return True
        if self._votes.is_dir() or committed(self._folder):
            return committed(self._folder)
        raise RefusedError(Refusal(0, None, f"it gave up the save of step {self._request.step}"))

    def _decided(self) -> bool:
        """Whether rank 0 decided to commit. Raises RefusedError where it decided not to."""
        try:
            header, body = unseal(self._decision.read_bytes())
        except FileNotFoundError:
            return False
        except ValueError as error:
            raise CorruptCheckpointError(f"{self._decision}: it was altered ({error})") from None
        if header != {"save": self._request.save}:
            raise CorruptCheckpointError(f"{self._decision}: it is of another save")
        if not body:
            return True
        raise RefusedError(Refusal(**json.loads(body)))

    def _decide(self, refusal: Refusal | None) -> None:
        body = json.dumps(asdict(refusal)) if refusal is not None else ""
        self._put(self._decision, seal({"save": self._request.save}, body))

    def _sign_of_rank_0(self) -> int | None:
        """When it voted, or began to wait again."""
        try:
            return (self._votes / vote_name(0)).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _wait_until(self, holds: Callable[[], bool], otherwise: str, sign: Callable[[], object] = lambda: None) -> None:
        """sign: another value than before is a sign of life, with which patience begins again.

        Patience is twice that of rank 0, who is to be the first to lose it.
        """
        patience = 2 * self._request.vote_timeout_s
        polls, seen, deadline = _Polls(), None, time.monotonic() + patience
        while not holds():
            if (latest := sign()) != seen:
                seen, deadline = latest, time.monotonic() + patience
            if time.monotonic() > deadline:
                raise HeadwaterError(
                    f"saving step {self._request.step} failed: within {patience:g} s "
                    f"(twice checkpointing.vote_timeout_s) {otherwise}"
                )
            polls.sleep()

    def give_up(self, refusal: Refusal) -> Refusal:
        """Let the others know, and remove what is here to remove. Returns what to tell the own trainer."""
        try:
            if self._request.rank == 0:
                self._refuse(refusal)
            elif self._joined or self._votes.is_dir():
                self._refuse_as_one_of_many(refusal)
        except RefusedError as error:  # rank 0 took the folder away, and that is why this failed
            return error.refusal
        except (OSError, HeadwaterError) as error:
            _log.warning("the other ranks cannot be told that this one refuses: %s", error)
        return refusal

    def _refuse(self, refusal: Refusal) -> None:
        if committed(self._folder):
            return
        decision = replace(refusal, by=refusal.by or 0)
        try:
            self._decide(decision)
        except OSError:
            self._retire()  # which makes room
            self._decide(decision)
        self._retire()

    def _refuse_as_one_of_many(self, refusal: Refusal) -> None:
        if self._settled() or (self._votes / vote_name(self._request.rank)).exists():
            return
        self.remove_files()  # first, since a full disk may have no room for a vote either
        self._leave(refusal.errno, refusal.text, None)

    def _retire(self) -> None:
        """Remove the folder, at once for the other ranks."""
        target = self._folder.with_name(f"step_{self._request.step:06d}-{secrets.token_hex(4)}")
        try:
            os.rename(self._folder, target)
        except FileNotFoundError:
            return
        except OSError:
            target = self._folder
        discard(target)


class _Polls:
    """Sleeps that grow: many ranks ask one file system."""

    def __init__(self) -> None:
        self._next_s = _FIRST_POLL_S

    def sleep(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(1.5 * self._next_s, _LAST_POLL_S)
