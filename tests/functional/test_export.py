"""What a real run trained is what the exported model computes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import cast

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from headwater.cli.main import main
from headwater.config.load import load_config
from headwater.controller.build import build
from headwater.controller.interrupt import StopRequest
from headwater.controller.loop import run_rl
from headwater.engines.torch.engine import TorchEngine
from headwater.models.resolve import resolve
from headwater.workers.group import InlineGroup
from headwater.workers.train_rank import TrainRank


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_exported_model_computes_the_logits_of_the_live_engine(tmp_path: Path, precision: str):
    overrides = [
        "grpo.max_num_steps=1",
        "grpo.val_period=0",
        "grpo.val_at_end=false",
        "grpo.val_at_start=false",
        "data.validation=null",
        f"policy.precision={precision}",
        f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}",
        f"logger.log_dir={tmp_path / 'logs'}",
    ]
    loaded = load_config("grpo_tiny", overrides)
    with build(loaded, Console(file=io.StringIO())) as runtime:
        run_rl(runtime, StopRequest())
        engine = cast(InlineGroup[TrainRank], runtime.ranks).worker.policy.engine
        assert isinstance(engine, TorchEngine)
        live = engine.model
    output = tmp_path / "exported"
    assert main(["ckpt", "export", str(tmp_path / "checkpoints"), str(output), "--to", "hf"]) == 0

    exported = AutoModelForCausalLM.from_pretrained(output, local_files_only=True, attn_implementation="eager")
    untrained = AutoModelForCausalLM.from_pretrained(resolve("builtin:tiny"), dtype=exported.dtype)
    live.set_attn_implementation("eager")
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        logits = live(tokens).logits
        assert torch.equal(exported(tokens).logits, logits)
        assert not torch.equal(untrained(tokens).logits, logits), "the run changed nothing, so equality shows nothing"
    assert exported.dtype == getattr(torch, precision)
    assert exported.state_dict().keys() == live.state_dict().keys()
    assert all(torch.equal(tensor, live.state_dict()[name]) for name, tensor in exported.state_dict().items())
