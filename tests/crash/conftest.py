"""Runs that are killed, ahead of their tests; what an unkilled run does; and the counts, shown at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from crash_runs import KilledRun, Matrix, Unkilled

_matrix = Matrix()


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """In the runs that are killed too: two of them run at once."""


@pytest.fixture
def matrix() -> Matrix:
    """Of this session."""
    return _matrix


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _matrix.runs or _matrix.moments:
        terminalreporter.write_line(_matrix.summary())


@pytest.fixture(scope="session")
def unkilled(tmp_path_factory: pytest.TempPathFactory) -> Unkilled:
    return Unkilled(lambda: tmp_path_factory.mktemp("unkilled"))


@pytest.fixture(scope="module")
def killed(
    _one_thread: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Any], KilledRun]]:
    """The run of a test's case, ended by the module's `kill(case, folder)`.

    Runs of the next tests begin while this one looks at its own: most of a run is start-up, on one core.
    """
    tests = [item for item in request.session.items if item.parent is request.node]
    cases = [item.callspec.params["case"] for item in tests if isinstance(item, pytest.Function)]
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        runs = {case: pool.submit(request.module.kill, case, tmp_path_factory.mktemp("killed")) for case in cases}
        yield lambda case: runs[case].result()
        pool.shutdown(cancel_futures=True)
