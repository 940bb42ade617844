"""Whichever worker fails, and however: the call ends with that worker's name and reason, and no worker is left."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from process_tree import is_alive, state, wait_until
from sample_worker import RefusingWorker, SampleWorker

from headwater.config.schema import ClusterConfig
from headwater.errors import BlockedError, HeadwaterError, UserError
from headwater.workers.group import WorkerError, WorkerGroup, launch

HEARTBEAT_S = 2.0
PHASES = ("idle", "call", "collective")
WAYS = ("SIGKILL", "SIGSTOP", "exception")


def _began(folder: Path) -> Callable[[], bool]:
    return lambda: all((folder / f"began.{rank}").exists() for rank in range(2))


def _fail(group: WorkerGroup[SampleWorker], rank: int, way: str, phase: str, folder: Path) -> WorkerError:
    """Have one worker fail while both are in a phase, and return what the call raised."""
    began, pid = str(folder / "began"), group.call(SampleWorker.identity)[rank][3]

    def strike() -> None:
        os.kill(pid, getattr(signal, way))
        wait_until(lambda: not is_alive(pid) if way == "SIGKILL" else state(pid) == "T", f"{pid} gets {way}")

    with pytest.raises(WorkerError) as raised:
        _calls(group, rank, way, phase, began, strike)
    return raised.value


def _calls(
    group: WorkerGroup[SampleWorker], rank: int, way: str, phase: str, began: str, strike: Callable[[], None]
) -> None:
    if way == "exception":
        if phase == "idle":
            group.call_one(rank, SampleWorker.fail_first, rank)
        group.call(SampleWorker.fail_first if phase == "call" else SampleWorker.fail_alone, rank)
    if phase == "idle":
        strike()
        group.call(SampleWorker.sleep, began)
    struck = threading.Thread(target=lambda: (wait_until(_began(Path(began).parent), "both began"), strike()))
    struck.start()
    try:
        if phase == "call":
            group.call(SampleWorker.sleep, began)
        else:
            group.call(SampleWorker.reduce_without, rank, began)
    finally:
        struck.join()


def _check(ray_config: Callable[..., ClusterConfig], folder: Path, rank: int, way: str, phase: str) -> None:
    with launch(ray_config(heartbeat_timeout_s=HEARTBEAT_S)) as cluster:
        policy = cluster.start("policy", SampleWorker, "ours")
        other = cluster.start("value", SampleWorker, "theirs", beside=policy) if way == "SIGKILL" else policy
        pids = [identity[3] for group in (policy, other) for identity in group.call(SampleWorker.identity)]
        assert all(is_alive(pid) for pid in pids)

        error = _fail(policy, rank, way, phase, folder)

        assert (error.worker, error.rank, error.exit_code) == ("policy", rank, 1)
        assert str(error).startswith(f"worker policy[{rank}] of 2 (pid {pids[rank]} on ")
        if way == "exception":
            assert f"ValueError: rank {rank} will not" in str(error)
            assert "in _raise" in str(error)
        else:
            assert {"SIGKILL": "died", "SIGSTOP": "hangs: no sign of life"}[way] in str(error)
        with pytest.raises(WorkerError) as again:
            other.call(SampleWorker.identity)
        assert again.value is error
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "all workers are ended", 20.0)


@pytest.mark.parametrize(
    ("rank", "way", "phase"),
    [(1, "SIGKILL", "collective"), (0, "SIGSTOP", "call"), (1, "exception", "collective")],
)
def test_the_first_worker_that_fails_ends_the_call_and_all_workers(
    ray_config: Callable[..., ClusterConfig], tmp_path: Path, rank: int, way: str, phase: str
) -> None:
    _check(ray_config, tmp_path, rank, way, phase)


@pytest.mark.soak
@pytest.mark.parametrize(("rank", "way", "phase"), list(product((0, 1), WAYS, PHASES)))
def test_every_worker_fails_in_every_way_and_phase(
    ray_config: Callable[..., ClusterConfig], tmp_path: Path, rank: int, way: str, phase: str
) -> None:
    _check(ray_config, tmp_path, rank, way, phase)


@pytest.mark.soak
def test_a_worker_that_cannot_be_made_is_named(ray_config: Callable[..., ClusterConfig]) -> None:
    message = r"worker policy\[1\] of 2 .* raised ValueError in start: not today"
    with launch(ray_config()) as cluster, pytest.raises(WorkerError, match=message):
        cluster.start("policy", RefusingWorker)


@pytest.mark.soak
@pytest.mark.parametrize(("exit_code", "kind"), [(2, UserError), (3, BlockedError)])
def test_what_a_user_can_cause_stays_one_line_with_its_exit_code(
    ray_config: Callable[..., ClusterConfig], exit_code: int, kind: type[HeadwaterError]
) -> None:
    with launch(ray_config()) as cluster:
        group = cluster.start("policy", SampleWorker, "ours")
        with pytest.raises(kind) as raised:
            group.call(SampleWorker.fail_as_user, exit_code)

    assert str(raised.value) == "no such model: builtin:nothing"


@pytest.mark.soak
def test_a_call_that_does_not_end_shows_where_it_is(ray_config: Callable[..., ClusterConfig], tmp_path: Path) -> None:
    with launch(ray_config(call_timeout_s=5.0)) as cluster:
        group = cluster.start("policy", SampleWorker, "ours")
        with pytest.raises(WorkerError, match=r"has not ended sleep after 5 s; it is at\n") as raised:
            group.call(SampleWorker.sleep, str(tmp_path / "began"))

    assert "time.sleep(600)" in str(raised.value)


@pytest.mark.soak
def test_last_words_of_a_dead_worker_are_shown(ray_config: Callable[..., ClusterConfig]) -> None:
    with launch(ray_config()) as cluster:
        group = cluster.start("policy", SampleWorker, "ours")
        with pytest.raises(WorkerError, match=r"policy\[1\] .* died in exit: ") as raised:
            group.call_one(1, SampleWorker.exit, 7)

    assert str(raised.value).endswith("end of its standard error:\nlast words of this worker")


def test_a_cluster_that_nobody_serves_is_refused_in_one_line(ray_address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    with (
        pytest.raises(UserError, match=rf"cannot reach the Ray cluster at cluster.address=127.0.0.1:{port}: "),
        launch(ClusterConfig(launcher="ray", address=f"127.0.0.1:{port}")),
    ):
        pass
