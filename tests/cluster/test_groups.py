"""The same calls do the same in this process and in Ray's."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from sample_worker import Sample, SampleWorker

from headwater.config.schema import ClusterConfig
from headwater.errors import BlockedError, UserError
from headwater.workers import group as group_module
from headwater.workers.group import Cluster, InlineCluster, InlineGroup, Resources, WorkerGroup, launch


@pytest.fixture(scope="module")
def ray_group(ray_cluster: Cluster) -> WorkerGroup[SampleWorker]:
    return ray_cluster.start("policy", SampleWorker, "ours")


@pytest.fixture
def inline_group() -> Iterator[WorkerGroup[SampleWorker]]:
    with launch(ClusterConfig()) as cluster:
        yield cluster.start("policy", SampleWorker, "ours")


@pytest.fixture(params=["inline_group", "ray_group"])
def group(request: pytest.FixtureRequest) -> WorkerGroup[SampleWorker]:
    return request.getfixturevalue(request.param)


def test_each_worker_is_made_with_its_rank_and_the_number_of_ranks(group: WorkerGroup[SampleWorker]) -> None:
    identities = group.call(SampleWorker.identity)

    assert [identity[:3] for identity in identities] == [("ours", rank, group.world) for rank in range(group.world)]


def test_results_come_in_rank_order_though_rank_0_is_last(group: WorkerGroup[SampleWorker]) -> None:
    results = group.call(SampleWorker.double, Sample(-1, torch.arange(3.0)), late_s=0.3)

    assert [result.rank for result in results] == list(range(group.world))
    assert all(torch.equal(result.values, torch.tensor([0.0, 2.0, 4.0])) for result in results)


def test_scattered_parts_reach_their_rank(group: WorkerGroup[SampleWorker]) -> None:
    parts = [Sample(-1, torch.full((2,), float(rank + 5))) for rank in range(group.world)]

    results = group.scatter(SampleWorker.double, parts)

    assert [(result.rank, result.values.tolist()) for result in results] == [
        (rank, [2.0 * (rank + 5)] * 2) for rank in range(group.world)
    ]
    with pytest.raises(ValueError, match="one for each"):
        group.scatter(SampleWorker.double, [*parts, parts[0]])


def test_one_worker_can_be_called_alone(group: WorkerGroup[SampleWorker]) -> None:
    last = group.world - 1

    assert group.call_one(last, SampleWorker.identity)[1] == last
    with pytest.raises(ValueError, match=f"rank {group.world} is none of {group.world}"):
        group.call_one(group.world, SampleWorker.identity)


def test_ray_workers_live_in_processes_of_their_own_with_the_threads_they_reserved(
    ray_group: WorkerGroup[SampleWorker],
) -> None:
    pids = {identity[3] for identity in ray_group.call(SampleWorker.identity)}

    assert len(pids) == 2
    assert os.getpid() not in pids
    assert [threads for threads, *_ in ray_group.call(SampleWorker.threads)] == [1, 1]


def test_two_workers_reduce_a_tensor_together(ray_group: WorkerGroup[SampleWorker]) -> None:
    assert ray_group.call(SampleWorker.all_reduce, 10.0) == [21.0, 21.0]  # (10 + 0) + (10 + 1)


def test_groups_beside_each_other_share_cores(ray_cluster: Cluster, ray_group: WorkerGroup[SampleWorker]) -> None:
    beside = ray_cluster.start("value", SampleWorker, "theirs", beside=ray_group)

    ours, theirs = ray_group.call(SampleWorker.identity), beside.call(SampleWorker.identity)
    assert {identity[3] for identity in ours}.isdisjoint(identity[3] for identity in theirs)
    assert beside.call(SampleWorker.all_reduce, 1.0) == [3.0, 3.0]
    with pytest.raises(ValueError, match="beside policy"):
        ray_cluster.start("other", SampleWorker, "x", beside=ray_group, resources=Resources(workers_per_node=1))
    beside.close()
    beside.close()
    assert ray_group.call(SampleWorker.all_reduce, 1.0) == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="value is closed"):
        beside.call(SampleWorker.identity)


def test_warnings_of_a_worker_are_logged_here_with_its_name(
    ray_group: WorkerGroup[SampleWorker], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ray_group.call_one(1, SampleWorker.warn, "mind the gap")

    assert [(record.name, record.message) for record in caplog.records] == [
        ("headwater.sample", "policy[1]: mind the gap")
    ]


def test_a_group_that_does_not_fit_is_refused_in_time_and_takes_nothing(ray_group: WorkerGroup[SampleWorker]) -> None:
    from headwater.workers.ray_cluster import Room

    # The cluster has two cores, and the group has one of them.
    with pytest.raises(UserError, match=r"no room for wide after 1 s: 1 x 64 workers with 1 CPU each do not fit"):
        Room("wide", Resources(workers_per_node=64), 1.0)
    narrow = Room("narrow", Resources(workers_per_node=1), 30.0)
    with pytest.raises(UserError, match=r"1 nodes \(2 CPU, 0 GPU\)"):
        Room("second", Resources(workers_per_node=1), 1.0)
    narrow.enter()
    narrow.leave()
    after = Room("after", Resources(workers_per_node=1), 30.0)
    after.enter()
    after.leave()


def test_joining_ray_leaves_the_handlers_of_signals(ray_cluster: Cluster) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    # Ignored where a shell started the tests in its background.
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)


def test_an_error_of_an_inline_worker_is_not_wrapped() -> None:
    group = InlineCluster().start("policy", SampleWorker, "ours")

    with pytest.raises(ValueError, match="rank 0 will not"):
        group.call(SampleWorker.fail_alone, 0)
    assert isinstance(group, InlineGroup)
    assert group.worker.tag == "ours"


def test_inline_refuses_more_than_one_worker() -> None:
    with pytest.raises(ValueError, match="one worker, not 4"):
        InlineCluster().start("policy", SampleWorker, "x", resources=Resources(2, 2))


def test_a_missing_ray_names_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "find_spec", lambda name: None)

    with pytest.raises(BlockedError, match=r"pip install 'headwater\[ray\]'"), launch(ClusterConfig(launcher="ray")):
        pass


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"workers_per_node": 2}, "workers_per_node is read only with launcher=ray"),
        ({"launcher": "ray", "gpus_per_node": 2, "workers_per_node": 2}, "one worker a GPU"),
        ({"launcher": "ray", "gpus_per_node": 2, "device": "cpu"}, "contradicts"),
        ({"launcher": "ray", "device": "cuda"}, "needs gpus_per_node"),
        ({"launcher": "ray", "num_nodes": 2}, "num_nodes above 1 needs address"),
        ({"launcher": "ray", "cpus_per_worker": 1.5}, "whole above 1"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterConfig.model_validate(keys)


def test_gpus_make_one_worker_each() -> None:
    config = ClusterConfig(launcher="ray", address="auto", num_nodes=2, gpus_per_node=8, cpus_per_worker=4)

    assert Resources.of(config) == Resources(2, 8, 4, 1)
    assert Resources.of(config).world == 16
