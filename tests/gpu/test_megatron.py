"""megatron-core on a CUDA device: the same losses as transformers, and runs of the command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path += [str(Path(__file__).parents[1] / "megatron"), str(Path(__file__).parents[1] / "unit" / "engines")]

from families import FAMILIES, make_model
from parallel_ranks import rollout

from headwater.cli.main import main
from headwater.config.load import load_config
from headwater.engines.base import TrainEngine
from headwater.engines.torch.engine import TorchEngine
from headwater.metrics.sinks import read_jsonl
from headwater.workers.train import PolicyWorker

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def own_groups() -> Iterator[None]:
    """What a run in one process makes of itself is given up for the tests that follow."""
    yield
    from headwater.engines.megatron.model import forget_parallel_sizes

    forget_parallel_sizes()
    if dist.is_initialized():
        dist.destroy_process_group()


def train(engine: TrainEngine, sequences: list[Any]) -> tuple[list[float], list[float]]:
    worker = PolicyWorker(engine, None, load_config("grpo_tiny").config.loss_fn, skip_without_signal=False)
    losses, norms = [], []
    for _ in range(5):
        losses.append(worker.forward_backward(sequences).loss_sum)
        norms.append(worker.optim_step().grad_norm)
    return losses, norms


@pytest.mark.parametrize("family", FAMILIES)
def test_five_steps_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from headwater.engines.megatron.engine import MegatronEngine

    words = ["policy.train_micro_batch_size=3", "policy.train_global_batch_size=12", "policy.optimizer.lr=1e-3"]
    words += ["grpo.num_generations_per_prompt=3", "policy.logprob_batch_size=2"]
    path, device = make_model(family, tmp_path), torch.device("cuda", 0)
    reference = TorchEngine(load_config("grpo_tiny", words).config.policy, path, device)
    sequences = rollout(11)
    sequences = [
        replace(s, prev_logprobs=logprobs) for s, logprobs in zip(sequences, reference.logprobs(sequences), strict=True)
    ]
    config = load_config("grpo_tiny", [*words, "policy.megatron_cfg.enabled=true"]).config
    engine = MegatronEngine(config.policy, path, device)
    losses, norms = train(engine, sequences)
    expected, expected_norms = train(reference, sequences)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert losses[0] != losses[-1], "nothing trained"


@pytest.mark.parametrize("recipe", ["grpo_tiny", "ppo_tiny"])
def test_a_run_trains_saves_fresh_checkpoints_and_resumes(recipe: str, tmp_path: Path) -> None:
    algorithm = recipe.removesuffix("_tiny")
    words = ["train", recipe, f"checkpointing.checkpoint_dir={tmp_path / 'ck'}", f"logger.log_dir={tmp_path / 'logs'}"]
    words += ["policy.megatron_cfg.enabled=true", "policy.precision=bfloat16"]
    words += ["policy.offload_policy_before_refit=true", "data.validation=null"]
    words += [f"{algorithm}.{key}" for key in ("val_period=0", "val_at_start=false", "val_at_end=false")]
    words += ["checkpointing.save_period=1", "checkpointing.keep_latest_k=null"]
    if algorithm == "ppo":
        words += ["value.megatron_cfg.enabled=true", "ppo.models_take_turns=true"]
    assert main([*words, f"{algorithm}.max_num_steps=3"]) == 0
    assert main([*words, f"{algorithm}.max_num_steps=4"]) == 0
    steps = sorted((tmp_path / "ck").glob("step_*"))
    assert len(steps) == 4
    for old, new in pairwise(steps):
        assert main(["ckpt", "freshness", str(old), str(new)]) == 0
    metrics = read_jsonl(tmp_path / "logs" / "metrics.jsonl")
    assert max(metrics["train/token_mult_prob_error"].values()) < 1.05
    assert sorted(metrics["memory/retained_after_offload"]) == [1, 2, 3, 4]
    assert metrics["train/optim_steps"][4] > metrics["train/optim_steps"][3]


def test_the_model_that_trains_generates_itself(tmp_path: Path) -> None:
    words = [
        "train",
        "grpo_tiny",
        f"checkpointing.checkpoint_dir={tmp_path / 'ck'}",
        f"logger.log_dir={tmp_path / 'logs'}",
    ]
    words += ["policy.megatron_cfg.enabled=true", "policy.generation.backend=megatron", "policy.precision=bfloat16"]
    assert main([*words, "policy.offload_policy_before_refit=true"]) == 0
    metrics = read_jsonl(tmp_path / "logs" / "metrics.jsonl")
    assert max(metrics["train/token_mult_prob_error"].values()) < 1.05
    assert metrics["refit/version"] == metrics["train/optim_steps"]
    assert min(metrics["train/grad_norm"].values()) > 0
