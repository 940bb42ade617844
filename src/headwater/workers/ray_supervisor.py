"""Watches the workers of all groups of a run: the first that dies, hangs or raises ends every call.

Each process is asked for a sign of life all the time, whether it works or not. When one rank fails its peers fail in
their collectives soon after, and what they say may arrive before the reason does. So whatever is noticed first, all
are heard for a moment, and then a dead worker is the reason rather than one that raised, and among those that raised
the first. All are killed then, since none could go on and some would wait for ever.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from headwater.errors import BlockedError, HeadwaterError, UserError
from headwater.workers.group import WorkerError
from headwater.workers.ray_host import Answer, Raised

_log = logging.getLogger(__name__)
_BEAT_S = 0.5
_POLL_S = 0.1
_SETTLE_S = 2.0
_STDERR_BYTES = 2000


@dataclass(eq=False)
class Member:
    """One worker. actor: its WorkerHost. The rest is known once the process has answered."""

    group: str
    rank: int
    world: int
    actor: Any
    where: str = ""
    stderr: str = ""
    ping: Any = None
    heard: float = 0.0

    def __str__(self) -> str:
        return f"worker {self.group}[{self.rank}] of {self.world}" + (f" ({self.where})" if self.where else "")


class Cause(IntEnum):
    """Why a worker failed, the more likely root of others' failures first."""

    DIED = 0
    HANGS = 1
    RAISED = 2


@dataclass(frozen=True)
class Fault:
    """What was noticed. time: of the worker's clock where it raised, else of this one."""

    cause: Cause
    time: float
    member: Member
    error: HeadwaterError


class Supervisor:
    """heartbeat_timeout_s: a process that does not answer for so long hangs."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self.failure: HeadwaterError | None = None
        self._timeout_s = heartbeat_timeout_s
        self._members: list[Member] = []
        self._lock = threading.RLock()
        self._settling = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-worker-supervisor", daemon=True)
        self._thread.start()

    def watch(self, members: list[Member]) -> None:
        """Begin to watch."""
        for member in members:
            member.heard = time.monotonic()
        with self._lock:
            self._members = self._members + members

    def forget(self, members: list[Member]) -> None:
        """Watch no more, before they are ended."""
        with self._lock:
            self._members = [member for member in self._members if member not in members]

    def wait(self, refs: Mapping[Any, Member], what: str, timeout_s: float) -> dict[Member, Any]:
        """The values that workers answer with. refs: each one's pending Answer. what: for messages."""
        waiting, values = dict(refs), {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            self.raise_failure()
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_POLL_S)
            for ref in ready:
                member = waiting.pop(ref)
                answer = self._taken(ref, member, what)
                if isinstance(answer, Fault):
                    self._fail(answer, waiting, what)
                else:
                    values[member] = answer.value
            if not ready and time.monotonic() > deadline:
                member = next(iter(waiting.values()))
                self._fail(_overdue(member, what, timeout_s), waiting, what)
        return values

    def raise_failure(self) -> None:
        """Raise what ended the run, if anything did."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Watch nobody any more."""
        self._closing.set()
        self._thread.join(4 * _BEAT_S + _SETTLE_S)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(_BEAT_S) and self.failure is None:
            with self._lock:
                members = self._members
            try:
                fault = self._beat(members, slept=time.monotonic() - last > self._timeout_s / 2)
            except Exception as error:
                if self._closing.is_set():
                    return
                self.failure = HeadwaterError(f"the workers cannot be watched any more: {error}")
                return
            last = time.monotonic()
            if fault is not None and fault.member in self._members:
                self._fail(fault, {}, "")

    def _beat(self, members: list[Member], *, slept: bool) -> Fault | None:
        """Ask each member that has answered for another sign of life. slept: this process itself did not run."""
        for member in members:
            if slept:
                member.heard = time.monotonic()
            if member.ping is None:
                member.ping = member.actor.ping.remote()
        pings = {member.ping: member for member in members}
        ready = ray.wait(list(pings), num_returns=len(pings), timeout=_BEAT_S)[0] if pings else []
        for ref in ready:
            member = pings[ref]
            member.ping = None
            try:
                ray.get(ref)
                member.heard = time.monotonic()
            except ActorUnavailableError:
                pass  # the way to it is broken: for how long decides
            except RayError as error:
                return _died(member, error, "")
        now = time.monotonic()
        silent = [member for member in members if now - member.heard > self._timeout_s]
        return _hangs(silent[0], now - silent[0].heard) if silent else None

    def _taken(self, ref: Any, member: Member, what: str) -> Answer | Fault:
        try:
            answer: Answer = ray.get(ref)
        except RayTaskError as error:  # what went in or came out cannot be sent
            return Fault(
                Cause.RAISED, time.time(), member, _worker_error(member, f"failed in {what}: {_plain(str(error))}")
            )
        except RayError as error:
            return _died(member, error, what)
        for logger, level, message in answer.records:
            logging.getLogger(logger).log(level, "%s[%d]: %s", member.group, member.rank, message)
        return answer if answer.raised is None else _raised(member, answer.raised, what)

    def _fail(self, first: Fault, waiting: Mapping[Any, Member], what: str) -> None:
        """Find the reason, kill all workers, and raise."""
        with self._settling:
            if self.failure is None:
                faults = [first, *self._others(first, dict(waiting), what)]
                root = min(faults, key=lambda fault: (fault.cause, fault.time))
                self.failure = root.error
                with self._lock:
                    for member in self._members:
                        with suppress(Exception):
                            ray.kill(member.actor, no_restart=True)
        if threading.current_thread() is not self._thread:
            raise self.failure

    def _others(self, first: Fault, waiting: dict[Any, Member], what: str) -> list[Fault]:
        """What else went wrong at the same time: every worker is asked, the dead ones cannot answer."""
        with self._lock:
            members = [member for member in self._members if member is not first.member]
        pings = {member.actor.ping.remote(): member for member in members}
        found: dict[Member, Fault] = {}
        deadline = time.monotonic() + _SETTLE_S
        while pings and time.monotonic() < deadline:
            ready, _ = ray.wait(list(pings), num_returns=1, timeout=_POLL_S)
            for ref in ready:
                member = pings.pop(ref)
                try:
                    ray.get(ref)
                except RayError as error:
                    found[member] = _died(member, error, what)
        ready = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)[0] if waiting else []
        for ref in ready:
            fault = self._taken(ref, waiting[ref], what)
            if isinstance(fault, Fault):
                found.setdefault(waiting[ref], fault)
        return list(found.values())


def _raised(member: Member, raised: Raised, what: str) -> Fault:
    if raised.exit_code == UserError.exit_code:
        error: HeadwaterError = UserError(raised.message)
    elif raised.exit_code == BlockedError.exit_code:
        error = BlockedError(raised.message)
    elif raised.exit_code is not None:
        error = _worker_error(member, f"failed in {what}: {raised.message}")
    else:
        text = f"raised {raised.kind} in {what}: {raised.message}\n{raised.traceback.rstrip()}"
        error = _worker_error(member, text)
    return Fault(Cause.RAISED, raised.time, member, error)


def _died(member: Member, error: RayError, what: str) -> Fault:
    during = f" in {what}" if what else ""
    text = f"died{during}: {_detail(error)}{_last_words(member)}"
    return Fault(Cause.DIED, time.time(), member, _worker_error(member, text))


def _hangs(member: Member, silence_s: float) -> Fault:
    text = (
        f"hangs: no sign of life for {silence_s:.0f} s (cluster.heartbeat_timeout_s). Its process is stopped, "
        f"swapped out or on a node that cannot be reached{_last_words(member)}"
    )
    return Fault(Cause.HANGS, time.time(), member, _worker_error(member, text))


def _overdue(member: Member, what: str, timeout_s: float) -> Fault:
    stack = ""
    with suppress(Exception):
        stack = str(ray.get(member.actor.stack.remote(), timeout=_SETTLE_S))
    text = f"has not ended {what} after {timeout_s:.0f} s" + (f"; it is at\n{stack.rstrip()}" if stack else "")
    return Fault(Cause.HANGS, time.time(), member, _worker_error(member, text))


def _worker_error(member: Member, text: str) -> WorkerError:
    return WorkerError(f"{member} {text}", member.group, member.rank)


def _plain(text: str) -> str:
    """Without the colours that Ray gives its messages."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _detail(error: RayError) -> str:
    """One line of what Ray knows."""
    text = " ".join(str(error).split())
    detail = text.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    return f"{detail[:300].rstrip('. ')}. It was killed (by hand, or for want of memory) or crashed"


def _last_words(member: Member) -> str:
    """The end of its standard error, where that is on this node."""
    try:
        text = Path(member.stderr).read_bytes()[-_STDERR_BYTES:].decode(errors="replace").strip()
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if not line.startswith((":job_id:", ":actor_name:"))]  # Ray's own
    return "\n".join(["\nend of its standard error:", *lines]) if lines else ""
