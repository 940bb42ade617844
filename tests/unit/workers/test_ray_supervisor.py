"""Which of several failures is named, with a Ray whose answers arrive in the order that a test wants."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from headwater.workers import ray_supervisor
from headwater.workers.group import WorkerError
from headwater.workers.ray_host import Answer, Raised
from headwater.workers.ray_supervisor import Member, Supervisor


@dataclass(eq=False)
class Ref:
    """A pending answer: a value or an exception, there once `arrived`."""

    outcome: Any = None
    arrived: bool = True


@dataclass
class Actor:
    """Answers each ping with `ping`."""

    alive: Ref = field(default_factory=Ref)
    killed: bool = False

    @property
    def ping(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda: Ref(self.alive.outcome, self.alive.arrived))


def _wait(refs: Sequence[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
    ready = [ref for ref in refs if ref.arrived][:num_returns]
    if len(ready) < num_returns:
        time.sleep(min(timeout, 0.01))
    return ready, [ref for ref in refs if ref not in ready]


def _get(ref: Ref) -> Any:
    if isinstance(ref.outcome, Exception):
        raise ref.outcome
    return ref.outcome


def _kill(actor: Actor, no_restart: bool) -> None:
    actor.killed = no_restart


@pytest.fixture(autouse=True)
def _fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_supervisor, "ray", SimpleNamespace(wait=_wait, get=_get, kill=_kill))
    monkeypatch.setattr(ray_supervisor, "_BEAT_S", 0.02)
    monkeypatch.setattr(ray_supervisor, "_SETTLE_S", 0.2)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor(heartbeat_timeout_s=0.5)
    yield supervisor
    supervisor.close()


def _members(*actors: Actor) -> list[Member]:
    return [Member("policy", rank, len(actors), actor) for rank, actor in enumerate(actors)]


def _raised(at: float, message: str) -> Ref:
    return Ref(Answer(None, Raised(at, "RuntimeError", message, "its traceback", None), ()))


def test_a_dead_worker_is_named_though_the_error_of_its_peer_arrived_first(supervisor: Supervisor) -> None:
    members = _members(Actor(), Actor(Ref(ActorDiedError())), Actor())
    refs = {_raised(1.0, "connection closed by peer"): members[0], Ref(None, arrived=False): members[1]}
    supervisor.close()  # its thread would find the dead one by itself
    supervisor.watch(members)

    with pytest.raises(WorkerError, match=r"worker policy\[1\] of 3 died") as raised:
        supervisor.wait(refs, "optim_step", 10.0)

    assert (raised.value.rank, raised.value.worker) == (1, "policy")
    assert all(member.actor.killed for member in members)


def test_of_two_that_raised_the_first_is_named_whichever_arrived_first(supervisor: Supervisor) -> None:
    members = _members(Actor(), Actor())
    refs = {_raised(2.0, "aborted by peer"): members[0], _raised(1.0, "the cause"): members[1]}

    with pytest.raises(WorkerError, match=r"worker policy\[1\] .* in optim_step: the cause\nits traceback"):
        supervisor.wait(refs, "optim_step", 10.0)


@pytest.mark.timeout(60)
def test_a_worker_that_is_silent_for_too_long_ends_a_call_of_others(supervisor: Supervisor) -> None:
    members = _members(Actor(), Actor(Ref(None, arrived=False)))
    supervisor.watch(members)

    with pytest.raises(WorkerError, match=r"worker policy\[1\] of 2 hangs"):
        supervisor.wait({Ref(None, arrived=False): members[0]}, "optim_step", 3600.0)
    with pytest.raises(WorkerError, match=r"policy\[1\]"):
        supervisor.raise_failure()


def test_a_worker_that_cannot_be_reached_for_a_moment_is_not_dead(supervisor: Supervisor) -> None:
    actor = Actor(Ref(ActorUnavailableError("away", b"a" * 16)))
    members = _members(actor)
    supervisor.watch(members)
    time.sleep(0.1)
    actor.alive = Ref(None)

    assert supervisor.wait({Ref(Answer(7, None, ())): members[0]}, "optim_step", 60.0) == {members[0]: 7}
    supervisor.raise_failure()


def test_whoever_is_ended_on_purpose_is_no_failure(supervisor: Supervisor) -> None:
    actor = Actor()
    members = _members(actor)
    supervisor.watch(members)
    supervisor.forget(members)
    actor.alive = Ref(ActorDiedError())
    time.sleep(0.1)

    supervisor.raise_failure()
