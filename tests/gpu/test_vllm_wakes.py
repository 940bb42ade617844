"""The real vLLM beside a Megatron trainer must wake after each save, which it cannot beside NVRx without a lifecycle.

The run itself is a script: vllm_wakes.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("vllm_wakes.py")
LIMIT_S, ROUNDS = 420, 6


def missing() -> Iterator[str]:
    for name in ("vllm", "megatron.core", "nvidia_resiliency_ext"):
        try:
            found = find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            yield name


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(any(missing()), reason=f"needs {', '.join(missing())}"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vllm")
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--limit-s", str(LIMIT_S), "--rounds", str(ROUNDS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=LIMIT_S + 60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    results = [line.removeprefix("RESULT ") for line in said.splitlines() if line.startswith("RESULT ")]
    assert results, f"no result, exit code {process.returncode}:\n{said[-4000:]}"
    return json.loads(results[-1])


@pytest.mark.parametrize("arm", ["native", "nvrx"])
def test_vllm_wakes_after_each_save(found: dict[str, Any], arm: str) -> None:
    rounds = found["arms"][arm]["rounds"]
    assert found["arms"][arm]["error"] is None
    assert [entry["tokens"] > 0 for entry in rounds] == [True] * ROUNDS
    assert [entry["fresh"] for entry in rounds] == ["fresh"] * ROUNDS
    assert all(entry["moments_moved"] == entry["moments"] > 0 for entry in rounds)
    assert all(entry["writer_alive"] for entry in rounds)
    assert len({entry["writer_pid"] for entry in rounds}) == 1
    assert max(entry["retained"] for entry in rounds) < 0.1 * found["state_bytes"]


def test_without_the_lifecycle_it_fails(found: dict[str, Any]) -> None:
    control = found["arms"]["control"]
    assert control["context_alone"]["tokens"] > 0, "the context of NVRx's process is not what is in the way"
    last = control["rounds"][-1]
    assert "wake_error" in last
    assert last["retained"] > 0.5 * found["state_bytes"]


def test_nothing_else_was_wrong(found: dict[str, Any]) -> None:
    assert found["problems"] == []
    assert found["passed"]
