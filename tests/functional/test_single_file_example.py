"""The teaching script runs as a user runs it, and learns."""

import importlib.util
import sys
from pathlib import Path
from statistics import fmean

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_single_file.py"


def test_the_single_file_example_learns(capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("grpo_single_file", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)

    history = example.main(steps=8)

    assert history.optimizer_steps == 16
    assert len(history.rewards) == 8
    assert min(history.group_stds) > 0, "rewards must vary within groups, or there is nothing to learn from"
    assert fmean(history.rewards[-3:]) > fmean(history.rewards[:3]) + 0.1
    assert capsys.readouterr().out.count("reward") == 8
