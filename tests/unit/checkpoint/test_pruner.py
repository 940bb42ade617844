"""Retention in the background: who waits for it, and for how long."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.checkpoint import pruner as pruner_module
from headwater.checkpoint.pruner import Pruner
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, the folder cannot be listed, as on a file system that hangs."""
    go = threading.Event()
    monkeypatch.setattr(pruner_module, "save_folders", lambda root: (go.wait(10), [])[1])
    yield go
    go.set()


def test_a_file_system_that_hangs_is_waited_for_no_longer_than_said(
    tmp_path: Path, hanging: threading.Event, caplog: pytest.LogCaptureFixture
):
    pruner = Pruner(tmp_path, CheckpointingConfig(), background=True)
    pruner.prune()
    with pytest.raises(HeadwaterError, match=r"are not removed after 0\.05 s"):
        pruner.wait(0.05)
    pruner.close(0.05)
    assert "are not removed after 0.05 s" in caplog.text
    hanging.set()
    pruner.wait(10)
    pruner.close(10)


def test_after_close_nothing_is_begun_that_would_be_waited_for(tmp_path: Path):
    pruner = Pruner(tmp_path, CheckpointingConfig(), background=True)
    pruner.record_metric(1, 0.5)
    pruner.close(10)
    pruner.record_metric(2, 0.5)
    pruner.wait(0)
    assert pruner.metric_history == {"1": 0.5, "2": 0.5}
