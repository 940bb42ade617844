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
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from headwater.checkpoint.byte_digest import digest_bytes
from headwater.checkpoint.commit import commit, committed, discard
from headwater.checkpoint.manifest import FileEntry, Manifest, validate
from headwater.checkpoint.write_request import WriteRequest, difference_text, receive, send
from headwater.errors import HeadwaterError

_HEARTBEAT_S = 0.5
_PIECE = 16 << 20
_PR_SET_PDEATHSIG = 1


class Attempt:
    """One try at writing one save into a folder of its own."""

    def __init__(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        self.message = message
        self.folder = Path(message["folder"])
        self.bytes_written = 0
        self._made = False
        self._fds = fds

    def run(self, workers: ThreadPoolExecutor) -> dict[str, Any]:
        """Write, prove and commit. Returns the measured seconds and bytes; raises OSError or HeadwaterError."""
        started = time.perf_counter()
        request = WriteRequest.from_memfd(self._fds[0], self.message["json_bytes"])
        for leftover in self.message["discard"]:
            discard(Path(leftover))
        self.folder.mkdir()
        self._made = True
        files = [self._write_small(path, data) for path, data in request.small.items()]
        images = {path: _map(fd, size) for fd, (path, size) in zip(self._fds[1:], request.images, strict=True)}
        with ExitStack() as closing:
            synced = [self._write_image(path, image, workers, closing) for path, image in images.items()]
            digests = list(workers.map(lambda c: digest_bytes(images[c.file][c.begin : c.end]), request.chunks))
            files += [FileEntry(path, len(image), digest_bytes(image)) for path, image in images.items()]
            for future in synced:
                future.result()
        differing = [
            f"{chunk.component} {chunk.name}"
            for chunk, digest in zip(request.chunks, digests, strict=True)
            if chunk.digest != digest
        ]
        if differing:
            raise HeadwaterError(difference_text(self.folder, differing))
        written_at = time.perf_counter()
        self._commit(request, files)
        committed_at = time.perf_counter()
        return {
            "bytes": sum(file.size for file in files),
            "write_s": written_at - started,
            "commit_s": committed_at - written_at,
        }

    def _write_small(self, path: str, data: bytes) -> FileEntry:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return FileEntry(path, len(data), digest_bytes(data))

    def _write_image(
        self, path: str, image: np.ndarray, workers: ThreadPoolExecutor, closing: ExitStack
    ) -> Future[None]:
        """Begin to write; the result is there when the file is synced. At the end of `closing` nobody writes it."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        closing.callback(os.close, descriptor)
        begins = range(0, len(image), _PIECE)
        pieces = [workers.submit(self._write_piece, descriptor, image, begin) for begin in begins]
        # Workers take jobs in their order, so that this one only ever waits for pieces that are being written.
        synced = workers.submit(_sync, pieces, descriptor)
        closing.callback(wait, [*pieces, synced])
        return synced

    def _write_piece(self, descriptor: int, image: np.ndarray, begin: int) -> None:
        end = min(begin + _PIECE, len(image))
        while begin < end:
            count = os.pwrite(descriptor, image[begin:end].data, begin)
            begin += count
            self.bytes_written += count

    def _commit(self, request: WriteRequest, files: Iterable[FileEntry]) -> None:
        manifest = Manifest(
            run_id=request.run_id,
            save_id=self.message["save_id"],
            step=request.step,
            weight_version=request.weight_version,
            model_identity=request.model_identity,
            saved_at_ns=request.saved_at_ns,
            chunks=request.chunks,
            files=tuple(files),
        )
        validate(manifest, str(self.folder))
        commit(self.folder, manifest)

    def give_up(self) -> None:
        """Remove what this attempt made, unless it reached its commit point."""
        if self._made and not committed(self.folder):
            discard(self.folder)

    def close(self) -> None:
        """Close the descriptors that came with the message."""
        for fd in self._fds:
            os.close(fd)


def _map(fd: int, size: int) -> np.ndarray:
    """The image, read-only: a writer cannot spoil what another attempt may need."""
    return np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), np.uint8)


def _sync(pieces: Iterable[Future[None]], descriptor: int) -> None:
    for piece in pieces:
        piece.result()
    os.fsync(descriptor)


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
        while True:
            attempt = self._attempts.get()
            self._current = attempt
            try:
                answer = {"kind": "committed", **attempt.run(self._workers)}
            except OSError as error:
                attempt.give_up()
                answer = {"kind": "failed", "errno": error.errno, "text": error.strerror or str(error)}
            except Exception as error:
                attempt.give_up()
                name = "" if isinstance(error, HeadwaterError) else f"{type(error).__name__}: "
                answer = {"kind": "failed", "errno": None, "text": f"{name}{error}"[:4000]}
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
