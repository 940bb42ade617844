"""One Ray for all tests of this folder, joined by each of them as a cluster that was there before."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from process_tree import below, is_alive

from headwater.config.schema import ClusterConfig
from headwater.workers.group import Cluster, launch
from headwater.workers.ray_local import LocalRay, authenticate


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """HOST:PORT of a Ray with two cores; nothing of it may be left in the end."""
    authenticate()
    local = LocalRay(120.0)
    yield local.address
    # multiprocessing's tracker is this program's own, and ends with it.
    processes = {pid: name for pid, name in below(os.getpid()).items() if "resource_tracker" not in name}
    assert any("gcs_server" in name for name in processes.values())
    assert any("raylet" in name for name in processes.values())
    local.close()
    assert [name for pid, name in processes.items() if is_alive(pid)] == []
    assert not local.folder.exists()


@pytest.fixture(scope="session")
def ray_config(ray_address: str) -> Callable[..., ClusterConfig]:
    """Two workers that share the cores, and short limits."""

    def config(**changes: object) -> ClusterConfig:
        own = {"workers_per_node": 2, "cpus_per_worker": 0.5, "heartbeat_timeout_s": 20.0}
        return ClusterConfig.model_validate({"launcher": "ray", "address": ray_address} | own | changes)

    return config


@pytest.fixture(scope="module")
def ray_cluster(ray_config: Callable[..., ClusterConfig]) -> Iterator[Cluster]:
    """For tests in which no worker fails."""
    with launch(ray_config()) as cluster:
        yield cluster
