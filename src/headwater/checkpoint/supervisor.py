"""A thread of the trainer that owns the writer process: starts it, watches it, replaces it.

A death is noticed at once through a pidfd, silence after `silence_s`. Then the process is killed, a new one is
started, and each unfinished save is written again from its buffers: into a new attempt's folder, or, where ranks save
together, into the one that they share, for which this rank's writer votes once (ballot.py). Whatever an earlier attempt
still says is ignored, since every message names its save and attempt.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import headwater
from headwater.checkpoint.ballot import Ballot
from headwater.checkpoint.commit import committed, discard
from headwater.checkpoint.host_buffer import Lease
from headwater.checkpoint.ranks import SAVE_ID_DIGITS
from headwater.checkpoint.votes import Refusal, error_of
from headwater.checkpoint.write_request import WriteRequest, receive, send
from headwater.errors import HeadwaterError

_log = logging.getLogger(__name__)
_MAX_ATTEMPTS = 3
_DEATH_S = 30.0


@dataclass
class Job:
    """A staged save until it is committed or given up; without a lease, one that this rank refuses.

    request_fd: memfd of `request`, whose JSON part has `json_bytes`. then: called in the supervisor's thread with
    (job, measurements, None) or (job, {}, error). lost_writers: how many died or fell silent when it was its turn.
    """

    root: Path
    request: WriteRequest
    request_fd: int
    json_bytes: int
    lease: Lease | None
    image_names: tuple[str, ...]
    then: Callable[[Job, dict[str, float], HeadwaterError | None], None]
    attempt: int = 0
    lost_writers: int = 0
    folders: list[Path] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Of the latest attempt."""
        return self.folders[-1]


class Supervisor:
    """silence_s: a writer that says nothing for so long while it has work is replaced. nice: of the writer.

    extra_fd: a descriptor that the writer holds too; a lock on it lasts as long as either process.
    """

    def __init__(self, silence_s: float, nice: int = 10, extra_fd: int | None = None) -> None:
        self.restarts = 0
        self._silence_s = silence_s
        self._nice = nice
        self._extra_fd = extra_fd
        self._lock = threading.Lock()
        self._incoming: list[Job] = []
        self._jobs: list[Job] = []
        self._closing = False
        self._broken: HeadwaterError | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._pidfd = -1
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="headwater-writer-supervisor", daemon=True)
        self._thread.start()

    @property
    def writer_pid(self) -> int | None:
        """Process id of the present writer."""
        process = self._process
        return process.pid if process is not None else None

    def submit(self, job: Job) -> None:
        """Have a staged save written, after those submitted before."""
        with self._lock:
            broken = self._broken
            if broken is None:
                self._incoming.append(job)
                os.eventfd_write(self._wake, 1)
        if broken is not None:
            _release(job)
            job.then(job, {}, broken)

    def close(self) -> None:
        """End the writer, and return once it is gone. Saves that are not committed are lost."""
        if not self._thread.is_alive():
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(2 * _DEATH_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        try:
            self._start()
            while not self._closing:
                self._step()
        except BaseException as error:
            _log.exception("the supervisor of the checkpoint writer failed")
            self._give_up(HeadwaterError(f"checkpoints cannot be written any more: {error}"))
        finally:
            self._stop()
            self._give_up(HeadwaterError("the checkpoints were closed before this save was written"))

    def _give_up(self, error: HeadwaterError) -> None:
        """Tell whoever waits for a save, and from now on whoever submits one."""
        with self._lock:
            self._broken = self._broken or error
            self._jobs += self._incoming
            self._incoming = []
        for job in list(self._jobs):
            try:
                self._finish(job, {}, error)
            except Exception:
                _log.exception("the end of the save of step %s could not be told", job.request.step)

    def _step(self) -> None:
        """Wait for whatever comes first and deal with it."""
        poller = select.poll()
        channel = self._channel.fileno() if self._channel is not None else -1
        for fd in (self._wake, self._pidfd, channel):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(1000.0 * min(1.0, self._silence_s / 4))}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if channel in ready:
            self._hear()
        if self._pidfd in ready:
            self._replace("died")
        with self._lock:
            incoming, self._incoming = self._incoming, []
        if incoming and self._process is None:
            self._start()
        for job in incoming:
            if not self._jobs:
                self._heard = time.monotonic()
            self._jobs.append(job)
            try:
                self._send(job)
            except Exception as error:  # of this save alone
                self._finish(job, {}, HeadwaterError(f"saving step {job.request.step} failed: {error}"))
        if self._jobs and time.monotonic() - self._heard > self._silence_s:
            self._replace(f"said nothing for {self._silence_s:g} s")

    def _hear(self) -> None:
        """Take in all that the writer has said."""
        assert self._channel is not None
        while True:
            try:
                message, _ = receive(self._channel)
            except (BlockingIOError, TimeoutError):
                return
            except OSError:
                message = None
            if message is None:  # its end is closed: the pidfd tells the same
                return
            self._heard = time.monotonic()
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        job = next((job for job in self._jobs if job.request.save == message["save"]), None)
        if job is None or message["attempt"] != job.attempt or message["kind"] == "alive":
            return
        if message["kind"] == "committed":
            measured = {key: float(message[key]) for key in ("bytes", "write_s", "readback_s", "commit_s")}
            self._finish(job, measured, None)
        else:
            refusal = Refusal(message["by"], message["errno"], message["text"])
            self._finish(job, {}, error_of(refusal, job.request.step, job.root))

    def _finish(self, job: Job, measured: dict[str, float], error: HeadwaterError | None) -> None:
        self._jobs.remove(job)
        _release(job)
        job.then(job, measured, error)

    def _send(self, job: Job) -> None:
        """Begin the job's next attempt. A writer that cannot take it is found dead or silent later."""
        assert self._channel is not None
        job.attempt += 1
        alone = job.request.world == 1
        save_id = secrets.token_hex(4) if alone else job.request.save[:SAVE_ID_DIGITS]
        job.folders.append(job.root / f"step_{job.request.step:06d}-{save_id}")
        message = {
            "kind": "save",
            "save": job.request.save,
            "attempt": job.attempt,
            "rank": job.request.rank,
            "folder": str(job.folder),
            "save_id": save_id,
            "json_bytes": job.json_bytes,
            "discard": [str(folder) for folder in job.folders[:-1] if alone and folder.exists()],
        }
        images = [job.lease.fd(name) for name in job.image_names] if job.lease is not None else []
        try:
            send(self._channel, message, [job.request_fd, *images])
        except OSError as error:
            _log.warning("the checkpoint writer cannot be reached: %s", error)

    def _replace(self, reason: str) -> None:
        """Start another writer and write again whatever the old one did not finish."""
        _log.warning("the checkpoint writer %s: starting another one", reason)
        self._hear()  # it may have said what it did last
        gone = self._stop()
        self.restarts += 1
        for index, job in enumerate(list(self._jobs)):
            if committed(job.folder):  # it only did not live to say so
                self._finish(job, {}, None)
            elif not gone and job.request.world > 1:  # it may still write into the folder that a retry would use
                text = f"saving step {job.request.step} failed: its writer process hangs in the kernel"
                self._finish(job, {}, HeadwaterError(text))
            elif index == 0:  # it takes them in their order: those behind have had no try yet
                self._count_lost_writer(job, reason)
        if self._jobs:  # without work, the next save starts it: one that cannot live must not be started for ever
            self._start()
        for job in self._jobs:
            self._send(job)

    def _count_lost_writer(self, job: Job, reason: str) -> None:
        """Give the save up where it is one too many."""
        job.lost_writers += 1
        if job.lost_writers < _MAX_ATTEMPTS:
            return
        text = f"saving step {job.request.step} failed: its writer process {reason} {job.lost_writers} times"
        if job.request.world > 1:
            Ballot(job.folder, job.request, job.attempt).give_up(Refusal(None, None, text))
        else:
            for folder in filter(Path.exists, job.folders):
                discard(folder)
        self._finish(job, {}, HeadwaterError(text))

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            fds = [theirs.fileno()] + ([self._extra_fd] if self._extra_fd is not None else [])
            module = ["-P", "-m", "headwater.checkpoint.writer_process"]
            words = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--nice", str(self._nice)]
            process = subprocess.Popen(
                [sys.executable, *module, *words],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # whoever reads the trainer's output must not wait for its writer
                start_new_session=True,
                env=_environment(),
            )
        self._process, self._channel = process, ours
        self._pidfd = os.pidfd_open(process.pid)
        self._heard = time.monotonic()

    def _stop(self) -> bool:
        """Kill the writer and wait until it is gone: two of them never write into one folder. Returns whether it is."""
        if self._process is None:
            return True
        gone = True
        if self._channel is not None:
            self._channel.close()
        try:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            gone = False
            _log.warning("checkpoint writer %d hangs in the kernel and is left behind", self._process.pid)
        os.close(self._pidfd)
        self._process, self._channel, self._pidfd = None, None, -1
        return gone


def _release(job: Job) -> None:
    os.close(job.request_fd)
    if job.lease is not None:
        job.lease.release()


def _environment() -> dict[str, str]:
    """The writer imports the very package that this process runs, and numpy starts no threads of its own there."""
    package_parent = str(Path(headwater.__file__).resolve().parent.parent)
    path = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
