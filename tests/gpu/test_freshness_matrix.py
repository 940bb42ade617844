"""Each way of saving through all paths on which Megatron's state moves: fresh, as it was live, nothing left behind.

HEADWATER_NVRX_VERSIONS="0.6.0=/folder,0.7.0=/folder" names folders with versions of nvidia-resiliency-ext besides the
installed one. Rows and tables are written into $OUT where that is set. HEADWATER_MATRIX_RESULTS names a folder with
such files of an earlier run, which are judged in place of a new one: the arms may be run one by one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")
EARLIER = os.environ.get("HEADWATER_MATRIX_RESULTS")
if "HEADWATER_NVRX_VERSIONS" not in os.environ:
    pytest.importorskip("nvidia_resiliency_ext", reason="needs nvidia-resiliency-ext")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and EARLIER is None, reason="torch sees no CUDA device"),
    pytest.mark.timeout(1200),
]

SCRIPT = Path(__file__).with_name("freshness_matrix.py")
ROWS = (
    "ppo_turns",
    "refit_before",
    "refit_after",
    "optimizer_offload_for_logprob",
    "distillation_student_offload",
    "offload_policy_before_refit_megatron_generation",
    "value_alone",
    "optimizer_state_appears",
    "no_move",
)
CONTROL_ROWS = ("ppo_turns", "refit_after", "optimizer_offload_for_logprob")
SAVES = 6
MEGABYTES = 400
ARM_TIMEOUT_S = 1100
MIB = 2**20
NVRX_RETAINED = 64 * MIB  # beyond its process's CUDA context
NATIVE_RETAINED = 16 * MIB
CONTROL_RETAINED = 0.5  # of the saved state that was on the device
STALE_VERSION = "0.6.0"  # reads what it was sent first, wherever that has moved
CURRENT_VERSION = "0.7.0"  # sends what has moved again


def versions() -> dict[str, str | None]:
    """Folder of each version to test, None for the installed one."""
    found: dict[str, str | None] = {}
    with suppress(importlib.metadata.PackageNotFoundError):
        found[importlib.metadata.version("nvidia-resiliency-ext")] = None
    named = os.environ.get("HEADWATER_NVRX_VERSIONS", "")
    return found | dict(pair.split("=", 1) for pair in named.split(",") if pair)


VERSIONS = versions()
OURS = [("native", next(iter(VERSIONS), "")), *(("nvrx", version) for version in VERSIONS)]
Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Told]:
    """Rows by name of an arm with a version of NVRx; each arm runs once."""
    known: dict[tuple[str, str], Told] = {}

    def of(arm: str, version: str) -> Told:
        if version not in VERSIONS:
            pytest.skip(f"needs nvidia-resiliency-ext {version}: name its folder in HEADWATER_NVRX_VERSIONS")
        if (arm, version) not in known:
            earlier = Path(EARLIER, f"matrix-{arm}-{version}.json") if EARLIER is not None else None
            if earlier is not None and not earlier.exists():
                pytest.skip(f"{earlier} is not among the results of the earlier run")
            kept = json.loads(earlier.read_text()) if earlier is not None else run(arm, version, tmp_path_factory)
            known[arm, version] = {row["row"]: row for row in kept["rows"]}
        return known[arm, version]

    return of


def run(arm: str, version: str, folders: pytest.TempPathFactory) -> dict[str, Any]:
    folder = folders.mktemp("matrix")
    path = [VERSIONS[version], os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in path if part)}
    words = [sys.executable, str(SCRIPT), "--arm", arm, "--folder", str(folder)]
    words += [] if arm in ("native", "nvrx") else ["--rows", ",".join(CONTROL_ROWS)]
    words += ["--saves", str(SAVES), "--megabytes", str(MEGABYTES)]
    said, errors = folder / "stdout", folder / "stderr"  # no pipes: a process that NVRx leaves behind holds them open
    with said.open("w") as stdout, errors.open("w") as stderr:
        process = subprocess.Popen(words, stdout=stdout, stderr=stderr, env=environment, start_new_session=True)
        try:
            process.wait(ARM_TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines, last_errors = said.read_text().splitlines(), errors.read_text()[-20000:]
    rows = [json.loads(line.removeprefix("ROW ")) for line in lines if line.startswith("ROW ")]
    table = [line for line in lines if not line.startswith("ROW ")]
    kept = {"arm": arm, "version": version, "rows": rows, "table": table, "stderr": last_errors}
    if out := os.environ.get("OUT"):
        Path(out, f"matrix-{arm}-{version}.json").write_text(json.dumps(kept, indent=1))
    assert rows, last_errors[-4000:]
    assert all(row["nvrx"] == version for row in rows), "another version was imported"
    return kept


def ended(rows: Told, name: str) -> dict[str, Any]:
    assert name in rows, f"the process ended before {name}; it told of {', '.join(rows)}"
    assert rows[name]["error"] is None
    assert rows[name]["saves"] == SAVES
    return rows[name]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("arm", "version"), OURS)
def test_saves_are_fresh_and_hold_what_was_live(
    arm: str, version: str, name: str, told: Callable[[str, str], Told]
) -> None:
    row = ended(told(arm, version), name)
    assert row["refusals"] == []
    assert [pair["outcome"] for pair in row["pairs"]] == ["fresh"] * (SAVES - 1)
    assert row["proven"] == [True] * SAVES
    assert row["problems"] == []


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("arm", "version"), OURS)
def test_saves_keep_nothing_on_the_device(arm: str, version: str, name: str, told: Callable[[str, str], Told]) -> None:
    row = ended(told(arm, version), name)
    assert row["used"]
    if arm == "native":
        assert row["retained_total"] < NATIVE_RETAINED
        assert row["writer"]["context"] is False
    else:
        assert row["retained_bytes"] < NVRX_RETAINED


@pytest.mark.parametrize("version", VERSIONS)
def test_the_writer_stays_where_nothing_moves(version: str, told: Callable[[str, str], Told]) -> None:
    row = ended(told("nvrx", version), "no_move")
    assert row["pid_stayed"]
    assert row["restarts"] == 0


@pytest.mark.parametrize("name", CONTROL_ROWS)
def test_without_a_lifecycle_saves_are_stale_after_a_move(name: str, told: Callable[[str, str], Told]) -> None:
    row = ended(told("control", STALE_VERSION), name)
    stale = [pair for pair in row["pairs"] if pair["outcome"] == "stale"]
    assert stale
    assert all(pair["stale_optimizer"] and pair["names"] for pair in stale)


@pytest.mark.parametrize("name", CONTROL_ROWS)
@pytest.mark.parametrize("version", [STALE_VERSION, CURRENT_VERSION])
def test_without_a_lifecycle_the_device_keeps_what_left_it(
    version: str, name: str, told: Callable[[str, str], Told]
) -> None:
    row = ended(told("control", version), name)
    assert row["device_bytes"] > 0
    assert row["retained_bytes"] > CONTROL_RETAINED * row["device_bytes"]


@pytest.mark.parametrize("name", CONTROL_ROWS)
def test_the_proof_alone_refuses_what_is_stale(name: str, told: Callable[[str, str], Told]) -> None:
    row = ended(told("proof-alone", STALE_VERSION), name)
    assert row["refusals"]
    assert all("does not hold what the live tensors held" in refusal["error"] for refusal in row["refusals"])
    assert all(pair["outcome"] == "fresh" for pair in row["pairs"])
    assert all(row["proven"])
