"""Two ranks save one checkpoint, each through an NVRx of its own, or neither does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from nvrx_saves import entries, python_words

from headwater.checkpoint.reader import Checkpoint, verify

pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra nvrx, which make test-slow installs")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]


def test_two_ranks_vote_on_what_their_nvrx_wrote(root: Path, tmp_path: Path):
    """Of the second step one rank's process is killed, the third one rank cannot save."""
    script = str(Path(__file__).with_name("rank.py"))
    left = root / ".nvrx" / "0123abcd-5-1"  # of a job with more ranks
    left.mkdir(parents=True)
    ranks = [
        subprocess.Popen(python_words(script, root, rank, tmp_path), stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [of_rank["restarts"] for of_rank in said] == [0, 1]
    assert [sorted(of_rank) for of_rank in said] == [["3", "restarts"]] * 2
    assert "twice" in said[1]["3"]
    assert said[0]["3"] == f"rank 1: {said[1]['3']}"
    assert entries(root) == [".lock", "step_000001", "step_000002", "step_000004"]
    for step in (1, 2, 4):
        (folder,) = root.glob(f"step_{step:06d}-*")
        checkpoint = Checkpoint.open_to_load(folder)
        assert verify(checkpoint) == []
        assert sorted(path.name for path in (folder / "nvrx").iterdir()) == ["__0_0.distcp", "__1_0.distcp"]
        reader = checkpoint.component("policy")
        assert reader.names() == ["own0", "own1", "w"]
        rows = reader.read("w")
        assert torch.equal(rows, torch.tensor([10.0 * step] * 3 + [10.0 * step + 1] * 3)[:, None].expand(6, 4))
