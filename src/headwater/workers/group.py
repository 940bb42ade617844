"""Groups of workers: one object in this process, or many in processes of their own, behind the same few calls.

    with launch(config.cluster) as cluster:
        policy = cluster.start("policy", PolicyWorker, config)
        value = cluster.start("value", ValueWorker, config, beside=policy)
        steps = policy.call(PolicyWorker.optim_step)  # one result a rank, in rank order

The factory, here a class, is called as `factory(*args, rank=..., world=...)` where the worker is to live. What goes in
and comes back is plain data and typed records with CPU tensors; inline they are handed over as they are, else copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from headwater.config.schema import ClusterConfig
from headwater.errors import HeadwaterError, require_extra
from headwater.workers.ray_local import authenticate

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class WorkerError(HeadwaterError):
    """A worker raised, died or hangs: the first that did, by name and rank, with its own traceback (exit code 1).

    worker: the name of its group. rank: its rank there.
    """

    def __init__(self, message: str, worker: str, rank: int) -> None:
        super().__init__(message)
        self.worker = worker
        self.rank = rank


@dataclass(frozen=True)
class Resources:
    """What a group takes: workers_per_node on each of num_nodes, each with cores of its own and at most one GPU."""

    num_nodes: int = 1
    workers_per_node: int = 1
    cpus_per_worker: float = 1.0
    gpus_per_worker: int = 0

    @classmethod
    def of(cls, config: ClusterConfig) -> Resources:
        """The whole cluster as configured."""
        workers = config.gpus_per_node or config.workers_per_node or 1
        return cls(config.num_nodes, workers, config.cpus_per_worker, 1 if config.gpus_per_node else 0)

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.num_nodes * self.workers_per_node

    def __str__(self) -> str:
        each = f"{self.cpus_per_worker:g} CPU" + (f" and {self.gpus_per_worker} GPU" if self.gpus_per_worker else "")
        return f"{self.num_nodes} x {self.workers_per_node} workers with {each} each"


class WorkerGroup(Protocol[W_co]):
    """Workers of one class. Methods are named by the class's own, such as `PolicyWorker.score`.

    Where workers have processes of their own, every method raises WorkerError as soon as any worker of the cluster
    raised, died or hangs, and UserError or BlockedError where that is what the worker raised.
    """

    name: str
    world: int

    def call(self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of all workers at once with the same arguments. Returns the results in rank order."""
        ...

    def scatter(self, method: Callable[[W_co, T], R], parts: Sequence[T], /) -> list[R]:
        """Call a method of all workers at once, each with its own part: `parts[rank]`. Results in rank order."""
        ...

    def call_one(self, rank: int, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of one worker."""
        ...

    def close(self) -> None:
        """End the workers and give back what they took. May be called again."""
        ...


class Cluster(Protocol):
    """Where workers run."""

    def start(
        self,
        name: str,
        factory: Callable[..., W],
        *args: Any,
        beside: WorkerGroup[Any] | None = None,
        resources: Resources | None = None,
    ) -> WorkerGroup[W]:
        """Start a group and wait until each `factory(*args, rank=..., world=...)` has returned.

        beside: take turns with the workers of that group on the same cores and devices, rank beside rank; without it
        the group has its own. resources: what it takes; None is the whole cluster as configured.
        Raises UserError where the cluster has no room for it.
        """
        ...

    def close(self) -> None:
        """End all workers, and the Ray that was started for them. May be called again."""
        ...


class InlineGroup(Generic[W]):
    """One worker in this process. What it raises is not wrapped, so that a debugger stops there."""

    world = 1

    def __init__(self, name: str, worker: W) -> None:
        self.name = name
        self._worker: W | None = worker

    @property
    def worker(self) -> W:
        """The object itself."""
        if self._worker is None:
            raise RuntimeError(f"the group {self.name} is closed")
        return self._worker

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """As WorkerGroup says."""
        return [getattr(self.worker, method.__name__)(*args, **kwargs)]

    def scatter(self, method: Callable[[W, T], R], parts: Sequence[T], /) -> list[R]:
        """As WorkerGroup says."""
        require_a_part_each(parts, self.world)
        return self.call(method, parts[0])

    def call_one(self, rank: int, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """As WorkerGroup says."""
        require_rank(rank, self.world)
        return self.call(method, *args, **kwargs)[0]

    def close(self) -> None:
        """Let go of the worker."""
        self._worker = None


class InlineCluster:
    """This process. There is one worker of each group, and all take turns."""

    def __init__(self) -> None:
        self._groups: list[InlineGroup[Any]] = []

    def start(
        self,
        name: str,
        factory: Callable[..., W],
        *args: Any,
        beside: WorkerGroup[Any] | None = None,
        resources: Resources | None = None,
    ) -> InlineGroup[W]:
        """As Cluster says; more than one worker raises ValueError."""
        if resources is not None and resources.world != 1:
            raise ValueError(f"{name}: cluster.launcher=inline has one worker, not {resources.world}")
        group = InlineGroup(name, factory(*args, rank=0, world=1))
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Let go of all workers."""
        for group in self._groups:
            group.close()


@contextmanager
def launch(config: ClusterConfig) -> Iterator[Cluster]:
    """The cluster that the configuration describes, closed again at the end.

    Raises BlockedError without the extra that it needs, UserError where a Ray cluster cannot be reached or started.
    """
    if config.launcher == "ray":
        if find_spec("ray") is None:
            raise require_extra("ray", "ray")
        if config.address is None:
            authenticate()
        from headwater.workers.ray_cluster import RayCluster

        cluster = cast(Cluster, RayCluster(config))
    else:
        cluster = InlineCluster()
    try:
        yield cluster
    finally:
        cluster.close()


def require_a_part_each(parts: Sequence[Any], world: int) -> None:
    """Raises ValueError where there is not one part a worker."""
    if len(parts) != world:
        raise ValueError(f"{len(parts)} parts for {world} workers: there must be one for each")


def require_rank(rank: int, world: int) -> None:
    """Raises ValueError for a rank that the group has not."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is none of {world} workers")
