"""Shared fixtures: the tiny model, made once, and sequences to score."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.data.types import TrainSequence
from headwater.engines.torch.engine import TorchEngine
from headwater.models.resolve import resolve


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests measured or counted and handed to `record_property("figure", ...)`."""
    reports = [report for some in terminalreporter.stats.values() for report in some]
    properties = [
        item for report in reports if getattr(report, "when", "") == "call" for item in report.user_properties
    ]
    figures = [str(value) for name, value in properties if name == "figure"]
    if figures:
        terminalreporter.section("figures")
        terminalreporter.write_line("\n".join(figures))


@pytest.fixture(scope="session", autouse=True)
def _one_thread_pool() -> None:
    # CPU results depend on the number of threads in the last bits; tests compare bits.
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Here, and in processes that take the number from here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _modules_of_a_test_end_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A user's module in a test's folder must not be found by the next test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return resolve("builtin:tiny")


@pytest.fixture
def tiny_config() -> Config:
    return load_config("grpo_tiny").config


@pytest.fixture
def make_engine(tiny_model: Path):
    """An engine over the tiny model, for a recipe with overrides."""

    def make(*overrides: str, trainable: bool = True, moves_on_host: bool = False) -> TorchEngine:
        policy = load_config("grpo_tiny", overrides).config.policy
        return TorchEngine(policy, tiny_model, torch.device("cpu"), trainable=trainable, moves_on_host=moves_on_host)

    return make


@pytest.fixture
def recorded_rollout() -> list[TrainSequence]:
    """Four groups of four completions of unequal lengths, with made-up generator log-probs: always the same."""
    generator = torch.Generator().manual_seed(7)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    sequences = []
    for group in range(4):
        prompt = integers(0, 256, int(integers(5, 12)))
        for _ in range(4):
            length = int(integers(1, 9))
            logprobs = -3 + torch.rand(length, generator=generator)
            sequences.append(
                TrainSequence(
                    group=group,
                    prompt_ids=prompt,
                    completion_ids=integers(0, 256, length),
                    generation_logprobs=logprobs,
                    sampling_logprobs=logprobs,
                    advantages=torch.randn((), generator=generator).expand(length),
                )
            )
    return sequences
