"""The process that writes checkpoints: `python -m headwater.checkpoint.writer_process`, started by its trainer.

It maps the staged images, writes and syncs them, computes digests of what it wrote, compares them with the live ones
and commits. It holds no CUDA context and no torch, and it ends when its trainer does, however that ends.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from headwater.checkpoint.ballot import Ballot
from headwater.checkpoint.byte_digest import digest_bytes, digest_many, warm_up
from headwater.checkpoint.commit import commit, committed, discard
from headwater.checkpoint.image_file import ImageFile
from headwater.checkpoint.layout import PAGE
from headwater.checkpoint.manifest import FileEntry, validate
from headwater.checkpoint.readback import read_back
from headwater.checkpoint.votes import Refusal, part_manifest, refusal_of
from headwater.checkpoint.write_request import WriteRequest, difference_text, receive, send
from headwater.errors import HeadwaterError

_HEARTBEAT_S = 0.5
_PR_SET_PDEATHSIG = 1


class Attempt:
    """One try at writing one save: into a folder of its own, or together with the writers of other ranks."""

    def __init__(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        self.message = message
        self.folder = Path(message["folder"])
        self.bytes_written = 0
        self._counting = threading.Lock()
        self._made = False
        self._ballot: Ballot | None = None
        self._fds = fds

    def run(self, workers: ThreadPoolExecutor) -> dict[str, Any]:
        """Write, prove and commit. Returns the measured seconds and bytes; raises OSError or HeadwaterError."""
        request = WriteRequest.from_memfd(self._fds[0], self.message["json_bytes"])
        return self._run_alone(request, workers) if request.world == 1 else self._run_with_others(request, workers)

    def _run_alone(self, request: WriteRequest, workers: ThreadPoolExecutor) -> dict[str, Any]:
        for leftover in self.message["discard"]:
            discard(Path(leftover))
        self.folder.mkdir()
        self._made = True
        files, measured = self._write(request, workers)
        written_at = time.perf_counter()
        manifest = part_manifest(request, self.message["save_id"], files)
        validate(manifest, str(self.folder))
        commit(self.folder, manifest)
        return {**measured, "commit_s": time.perf_counter() - written_at}

    def _run_with_others(self, request: WriteRequest, workers: ThreadPoolExecutor) -> dict[str, Any]:
        self._ballot = ballot = Ballot(self.folder, request, self.message["attempt"])
        measured: dict[str, Any] = {"bytes": 0, "write_s": 0.0, "readback_s": 0.0}
        if ballot.join():
            if request.refusal is not None:
                raise HeadwaterError(request.refusal)
            ballot.remove_files()
            files, measured = self._write(request, workers)
            ballot.vote(part_manifest(request, self.message["save_id"], files))
        voted_at = time.perf_counter()
        ballot.settle()
        return {**measured, "commit_s": time.perf_counter() - voted_at}

    def _write(self, request: WriteRequest, workers: ThreadPoolExecutor) -> tuple[list[FileEntry], dict[str, Any]]:
        """Write and prove all files of the request; returns them, and what was measured."""
        started = time.perf_counter()
        images = {path: _map(fd, size) for fd, (path, size) in zip(self._fds[1:], request.images, strict=True)}
        with ExitStack() as closing:
            pieces = [piece for path in images for piece in self._write_image(path, *images[path], workers, closing)]
            files = [self._write_small(path, data) for path, data in request.small.items()]
            digests = digest_many([images[c.file][0][c.begin : c.end] for c in request.chunks])
            checksums = digest_many([image[:size] for image, size in images.values()])
            for piece in pieces:
                piece.result()
        files += [FileEntry(path, images[path][1], checksum) for path, checksum in zip(images, checksums, strict=True)]
        differing = [
            f"{chunk.component} {chunk.name}"
            for chunk, digest in zip(request.chunks, digests, strict=True)
            if chunk.digest != digest
        ]
        if differing:
            raise HeadwaterError(difference_text(self.folder, differing))
        written_at = time.perf_counter()
        readback_s = read_back(self.folder, files, request.chunks) if request.readback else 0.0
        size = sum(file.size for file in files)
        return files, {"bytes": size, "write_s": written_at - started, "readback_s": readback_s}

    def _target(self, path: str) -> Path:
        """Where to write a file. The save's own folder is never made here: it may have been taken away."""
        for parent in reversed(Path(path).parents[:-1]):
            (self.folder / parent).mkdir(exist_ok=True)
        return self.folder / path

    def _write_small(self, path: str, data: bytes) -> FileEntry:
        target = self._target(path)
        with open(target, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return FileEntry(path, len(data), digest_bytes(data))

    def _write_image(
        self, path: str, image: np.ndarray, size: int, workers: ThreadPoolExecutor, closing: ExitStack
    ) -> list[Future[None]]:
        """Begin to write. At the end of `closing` nobody writes any more."""
        file = ImageFile(self._target(path), image, size, self._wrote)
        closing.callback(file.close)
        pieces = file.write(workers)
        closing.callback(wait, pieces)
        return pieces

    def _wrote(self, count: int) -> None:
        with self._counting:
            self.bytes_written += count

    def give_up(self, refusal: Refusal) -> Refusal:
        """Remove what this attempt made, unless it reached its commit point. Returns why the save failed."""
        if self._ballot is not None:
            return self._ballot.give_up(refusal)
        if self._made and not committed(self.folder):
            discard(self.folder)
        return refusal

    def close(self) -> None:
        """Close the descriptors that came with the message."""
        for fd in self._fds:
            os.close(fd)


def _map(fd: int, size: int) -> tuple[np.ndarray, int]:
    """The image in whole pages and its size; read-only: a writer cannot spoil what another attempt may need."""
    return np.frombuffer(mmap.mmap(fd, -(-size // PAGE) * PAGE, prot=mmap.PROT_READ), np.uint8), size


class Writer:
    """Answers the messages of one trainer, one save at a time in their order."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._attempts: queue.SimpleQueue[Attempt] = queue.SimpleQueue()
        self._current: Attempt | None = None
        self._workers = ThreadPoolExecutor(max(4, min(8, os.cpu_count() or 1)), "headwater-write")

    def run(self) -> None:
        """Never returns: the process ends when the trainer's end of the socket does."""
        threading.Thread(target=self._listen, name="headwater-listen", daemon=True).start()
        threading.Thread(target=self._beat, name="headwater-beat", daemon=True).start()
        threading.Thread(target=warm_up, name="headwater-warm-up", daemon=True).start()
        while True:
            attempt = self._attempts.get()
            self._current = attempt
            try:
                answer = {"kind": "committed", **attempt.run(self._workers)}
            except Exception as error:
                answer = {"kind": "failed", **vars(attempt.give_up(refusal_of(error)))}
            finally:
                attempt.close()
                self._current = None
            self._send(attempt, answer)

    def _listen(self) -> None:
        while True:
            try:
                message, fds = receive(self._channel)
            except OSError:
                message, fds = None, []
            if message is None:
                os._exit(0)  # whatever is half written is no checkpoint, and the next run removes it
            self._attempts.put(Attempt(message, fds))

    def _beat(self) -> None:
        while True:
            time.sleep(_HEARTBEAT_S)
            attempt = self._current
            if attempt is not None:
                self._send(attempt, {"kind": "alive", "bytes": attempt.bytes_written})

    def _send(self, attempt: Attempt, answer: dict[str, Any]) -> None:
        identity = {key: attempt.message[key] for key in ("save", "attempt", "rank")}
        try:
            send(self._channel, identity | answer)
        except OSError:
            os._exit(0)


def main() -> None:
    """Serve the socket whose descriptor is given until its other end closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--nice", type=int, default=10)
    args = parser.parse_args()
    # A signal to the whole process group is for the trainer, which may want one more save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The end of the socket is not seen by a stopped process; this signal is.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != args.parent:
        os._exit(0)
    os.nice(args.nice)
    Writer(socket.socket(fileno=args.fd)).run()


if __name__ == "__main__":
    main()
