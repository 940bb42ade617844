"""Worker groups as Ray actors: reserve room, start one process a worker, connect them, call them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headwater.config.schema import ClusterConfig
from headwater.errors import UserError
from headwater.workers.group import Resources, WorkerGroup, require_a_part_each, require_rank
from headwater.workers.ray_host import HEALTH, Description, WorkerHost
from headwater.workers.ray_local import LocalRay
from headwater.workers.ray_supervisor import Member, Supervisor

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_REACH_S = 10.0
_GPU_SHARE = 0.01  # of the one device that a bundle reserves: whoever is beside takes another share of it


class RayCluster:
    """A Ray cluster that was joined, or one of the run's own. Ends with `close`."""

    def __init__(self, config: ClusterConfig) -> None:
        if ray.is_initialized():
            raise UserError("Ray is in use in this process already: call ray.shutdown() before cluster.launcher=ray")
        self._config = config
        self._groups: list[RayGroup[Any]] = []
        self._local = LocalRay(config.start_timeout_s) if config.address is None else None
        try:
            _connect(self._local.address if self._local else str(config.address))
        except BaseException:
            if self._local:
                self._local.close()
            raise
        self._supervisor = Supervisor(config.heartbeat_timeout_s)

    def start(
        self,
        name: str,
        factory: Callable[..., W],
        *args: Any,
        beside: WorkerGroup[Any] | None = None,
        resources: Resources | None = None,
    ) -> RayGroup[W]:
        """As Cluster says."""
        self._supervisor.raise_failure()
        if isinstance(beside, RayGroup):
            room = beside.room
            if resources not in (None, room.resources):
                raise ValueError(f"{name}: beside {beside.name} it takes what that takes: {room.resources}")
        else:
            wanted = resources or Resources.of(self._config)
            self._require_room(name, wanted)
            room = Room(name, wanted, self._config.start_timeout_s)
        group = RayGroup[W](name, room, self._supervisor, self._config)
        self._groups.append(group)
        group.create(factory, args)
        return group

    def close(self) -> None:
        """As Cluster says."""
        self._supervisor.close()
        for group in reversed(self._groups):
            group.close()
        self._groups.clear()
        ray.shutdown()
        if self._local:
            self._local.close()

    def _require_room(self, name: str, wanted: Resources) -> None:
        """Refuse at once what a Ray of the run's own can never have; other clusters may grow."""
        if self._local is None:
            return
        has = ray.cluster_resources()
        rooms = {id(group.room): group.room.resources for group in self._groups if not group.closed}
        for kind, each in _bundle(wanted).items():
            taken = sum(room.world * _bundle(room).get(kind, 0.0) for room in rooms.values())
            if taken + wanted.world * each > has.get(kind, 0.0):
                raise UserError(
                    f"no room for {name}: {wanted} need {wanted.world * each:g} {kind}, and of this machine's "
                    f"{has.get(kind, 0.0):g} {taken:g} are taken; lower {_KEYS[kind]}, or put groups beside each other"
                )


class Room:
    """What a group of workers and those beside it take: a placement group for each node, a bundle for each rank.

    Raises UserError where the cluster has not got it within timeout_s.
    """

    def __init__(self, name: str, resources: Resources, timeout_s: float) -> None:
        self.resources = resources
        bundles = [_bundle(resources)] * resources.workers_per_node
        self._nodes = [placement_group(bundles, strategy="STRICT_PACK") for _ in range(resources.num_nodes)]
        self._users = 0
        deadline = time.monotonic() + timeout_s
        if not all(node.wait(max(deadline - time.monotonic(), 0.01)) for node in self._nodes):
            self._remove()
            has = [
                ", ".join(f"{node['Resources'].get(kind, 0.0):g} {kind}" for kind in _KEYS)
                for node in ray.nodes()
                if node["Alive"]
            ]
            raise UserError(
                f"no room for {name} after {timeout_s:.0f} s: {resources} do not fit beside what is taken on the "
                f"cluster's {len(has)} nodes ({'; '.join(has)}); see cluster.num_nodes and {_KEYS['CPU']}"
            )
        # So that ranks lie on the same nodes in each run.
        self._nodes.sort(key=_node_address)

    def place(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Where the worker of that rank goes."""
        node, index = divmod(rank, self.resources.workers_per_node)
        return PlacementGroupSchedulingStrategy(self._nodes[node], placement_group_bundle_index=index)

    def enter(self) -> None:
        """One more group uses it."""
        self._users += 1

    def leave(self) -> None:
        """A group uses it no more; the last one gives it back."""
        self._users -= 1
        if not self._users:
            self._remove()

    def _remove(self) -> None:
        for node in self._nodes:
            with suppress(Exception):
                remove_placement_group(node)


class RayGroup(Generic[W]):
    """Workers in processes of their own, with a torch process group between them."""

    def __init__(self, name: str, room: Room, supervisor: Supervisor, config: ClusterConfig) -> None:
        self.name = name
        self.room = room
        self.world = room.resources.world
        self.closed = False
        self._supervisor = supervisor
        self._config = config
        room.enter()
        share = _GPU_SHARE if room.resources.gpus_per_worker else 0
        actor = cast(Any, ray.remote)(concurrency_groups={HEALTH: 1})(WorkerHost)
        self._members = [
            Member(
                name,
                rank,
                self.world,
                actor.options(num_cpus=0, num_gpus=share, scheduling_strategy=room.place(rank)).remote(),
            )
            for rank in range(self.world)
        ]

    def create(self, factory: Callable[..., W], args: tuple[Any, ...]) -> None:
        """Connect the processes and make the workers in them."""
        places: list[Description] = self._all("start", [(sys.path,)] * self.world, "describe")
        for member, place in zip(self._members, places, strict=True):
            member.where = f"pid {place.pid} on {place.node}"
            member.stderr = place.stderr
        self._supervisor.watch(self._members)
        host, start_s = places[0].node, self._config.start_timeout_s
        port = self._wait({self._members[0].actor.open_store.remote(host, self.world, start_s): 0}, "start", start_s)[0]
        on_gpu, threads = bool(self.room.resources.gpus_per_worker), max(1, int(self.room.resources.cpus_per_worker))
        timeout_s = self._config.call_timeout_s
        joins = [(rank, self.world, (host, port), timeout_s, on_gpu, threads) for rank in range(self.world)]
        self._all("start", joins, "join")
        shared = ray.put((factory, args))
        self._all("start", [(shared, rank, self.world) for rank in range(self.world)], "create", timeout_s)

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """As WorkerGroup says."""
        shared = ray.put((args, kwargs))
        return self._all(method.__name__, [(method.__name__, shared)] * self.world, "call", self._config.call_timeout_s)

    def scatter(self, method: Callable[[W, T], R], parts: Sequence[T], /) -> list[R]:
        """As WorkerGroup says."""
        require_a_part_each(parts, self.world)
        calls = [(method.__name__, ((part,), {})) for part in parts]
        return self._all(method.__name__, calls, "call", self._config.call_timeout_s)

    def call_one(self, rank: int, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """As WorkerGroup says."""
        require_rank(rank, self.world)
        self._require_open()
        ref = self._members[rank].actor.call.remote(method.__name__, (args, kwargs))
        return self._wait({ref: rank}, method.__name__, self._config.call_timeout_s)[rank]

    def close(self) -> None:
        """As WorkerGroup says."""
        if self.closed:
            return
        self.closed = True
        self._supervisor.forget(self._members)
        for member in self._members:
            with suppress(Exception):
                ray.kill(member.actor, no_restart=True)
        self.room.leave()

    def _all(self, what: str, arguments: Sequence[tuple[Any, ...]], method: str, timeout_s: float | None = None) -> Any:
        """The values that all answer with, in rank order."""
        self._require_open()
        refs = {
            getattr(member.actor, method).remote(*own): member.rank
            for member, own in zip(self._members, arguments, strict=True)
        }
        values = self._wait(refs, what, timeout_s or self._config.start_timeout_s)
        return [values[rank] for rank in range(self.world)]

    def _wait(self, ranks: dict[Any, int], what: str, timeout_s: float) -> dict[int, Any]:
        values = self._supervisor.wait({ref: self._members[rank] for ref, rank in ranks.items()}, what, timeout_s)
        return {member.rank: value for member, value in values.items()}

    def _require_open(self) -> None:
        self._supervisor.raise_failure()
        if self.closed:
            raise RuntimeError(f"the group {self.name} is closed")


_KEYS = {"CPU": "cluster.cpus_per_worker or cluster.workers_per_node", "GPU": "cluster.gpus_per_node"}


def _bundle(resources: Resources) -> dict[str, float]:
    """What one worker takes."""
    gpu = {"GPU": float(resources.gpus_per_worker)} if resources.gpus_per_worker else {}
    return {"CPU": resources.cpus_per_worker, **gpu}


def _node_address(node: PlacementGroup) -> tuple[str, str]:
    """Sorts the nodes that rooms are on."""
    node_id = placement_group_table(node)["bundles_to_node_id"][0]
    return next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node_id), node_id


def _connect(address: str) -> None:
    if "://" in address:
        raise UserError(f"cluster.address={address}: Ray Client is not supported; give HOST:PORT, or auto on a node")
    # Answers that nobody fetches, because another worker failed first, are no news.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        if address != "auto":
            _require_listener(address)
        with _signal_handlers_kept():
            ray.init(address=address, configure_logging=False, log_to_driver=False)
    except (ConnectionError, TimeoutError, OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(f"cannot reach the Ray cluster at cluster.address={address}: {why}") from error


def _require_listener(address: str) -> None:
    """Raises OSError or ValueError at once where Ray itself would wait for a minute."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), _REACH_S).close()


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, with which this program saves first."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python cannot be
                signal.signal(number, handler)
