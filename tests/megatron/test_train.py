"""`headwater train` with megatron-core, in one process and over the ranks of a Ray, on CPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from families import make_model

from headwater.checkpoint.reader import Checkpoint
from headwater.cli.main import main
from headwater.metrics.sinks import read_jsonl
from headwater.models.resolve import resolve

pytest.importorskip("megatron.core", reason="needs the extra megatron, which make test-slow installs")
pytestmark = pytest.mark.slow
OVER_TWO = ("cluster.launcher=ray", "cluster.workers_per_node=2", "cluster.cpus_per_worker=0.5")
POLICY, VALUE = "policy.megatron_cfg", "value.megatron_cfg"


class Run:
    """A tiny recipe by a command of its own: what megatron-core needs on a CPU changes torch for its whole process."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.checkpoints, self.logs = folder / "checkpoints", folder / "logs"
        self._recipe = recipe
        self._algorithm = recipe.removesuffix("_tiny")

    def train(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        quiet = [f"{self._algorithm}.{key}" for key in ("val_period=0", "val_at_start=false", "val_at_end=false")]
        folders = [f"checkpointing.checkpoint_dir={self.checkpoints}", f"logger.log_dir={self.logs}"]
        words = ["train", self._recipe, *folders, *quiet, "data.validation=null", "policy.generation.max_new_tokens=4"]
        return subprocess.run(
            [sys.executable, "-m", "headwater.cli.main", *words, *overrides],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=240,
        )

    def metrics(self) -> dict[str, dict[int, float]]:
        return read_jsonl(self.logs / "metrics.jsonl")

    def at(self, step: int) -> Checkpoint:
        (folder,) = self.checkpoints.glob(f"step_{step:06d}-*")
        return Checkpoint.open(folder)


def assert_passed(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


def assert_one_line(ended: subprocess.CompletedProcess[str], words: str) -> None:
    assert ended.returncode == 2
    said = [line for line in ended.stderr.splitlines() if line.startswith("headwater: error:")]
    assert len(said) == 1
    assert words in said[0]
    assert not re.search("Traceback", ended.stderr)


def test_grpo_trains_as_the_torch_backend_does_which_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    megatron, torch_backend = Run(tmp_path / "megatron", "grpo_tiny"), Run(tmp_path / "torch", "grpo_tiny")
    options = ("policy.optimizer.lr=0.003", "grpo.max_num_steps=3", "loss_fn.reference_policy_kl_penalty=0.1")
    assert_passed(megatron.train(*options, f"{POLICY}.enabled=true"))
    assert_passed(torch_backend.train(*options))
    one, other = megatron.metrics(), torch_backend.metrics()
    assert one["train/reward"] == other["train/reward"]
    for tag in ("train/loss", "train/grad_norm", "train/kl_penalty"):
        assert one[tag] == {step: pytest.approx(value, rel=1e-3, abs=1e-5) for step, value in other[tag].items()}
    assert min(one["train/grad_norm"].values()) > 0
    assert one["refit/version"] == other["refit/version"]
    went_on = megatron.train(*options, "grpo.max_num_steps=4")
    assert_passed(went_on)
    assert "at step 3" in went_on.stdout
    assert main(["ckpt", "verify", str(megatron.checkpoints)]) == 0
    assert megatron.metrics()["train/optim_steps"][4] == 4 / 3 * megatron.metrics()["train/optim_steps"][3]


@pytest.mark.parametrize(
    "layout",
    [
        (),
        (*OVER_TWO, f"{POLICY}.tensor_model_parallel_size=2"),
        (*OVER_TWO, f"{POLICY}.pipeline_model_parallel_size=2"),
    ],
)
def test_the_model_that_megatron_trains_generates_what_a_copy_of_it_does(
    tmp_path: Path, layout: tuple[str, ...]
) -> None:
    own, copied = Run(tmp_path / "own", "grpo_tiny"), Run(tmp_path / "copied", "grpo_tiny")
    options = ("policy.optimizer.lr=0.003", "policy.offload_policy_before_refit=true", f"{POLICY}.enabled=true")
    assert_passed(own.train(*options, *layout, "policy.generation.backend=megatron"))
    assert_passed(copied.train(*options))
    one, other = own.metrics(), copied.metrics()
    assert one["train/reward"] == other["train/reward"]
    assert len(set(one["train/reward"].values())) > 1
    for tag in ("train/loss", "train/grad_norm"):
        assert one[tag] == {step: pytest.approx(value, rel=1e-3, abs=1e-5) for step, value in other[tag].items()}
    assert max(one["train/token_mult_prob_error"].values()) < 1.001
    assert one["refit/version"] == other["refit/version"] == one["train/optim_steps"]
    assert one["refit/version"][4] > one["refit/version"][1] > 0


def test_ppo_over_a_pipeline_saves_fresh_models_at_every_step_while_they_take_turns(tmp_path: Path) -> None:
    stay, turns = Run(tmp_path / "stay", "ppo_tiny"), Run(tmp_path / "turns", "ppo_tiny")
    cut = [f"{group}.{key}" for group in (POLICY, VALUE) for key in ("enabled=true", "pipeline_model_parallel_size=2")]
    options = (*cut, *OVER_TWO, "checkpointing.save_period=1", "checkpointing.keep_latest_k=null")
    assert_passed(stay.train(*options))
    assert_passed(turns.train(*options, "ppo.models_take_turns=true", "policy.offload_policy_before_refit=true"))
    assert turns.at(4).components() == ["policy", "value"]
    assert {chunk.file for chunk in turns.at(4).manifest.chunks} == {
        f"{component}/rank-0000{rank}.safetensors" for component in ("policy", "value") for rank in (0, 1)
    }
    for step in (1, 2, 3):
        assert main(["ckpt", "freshness", str(turns.at(step).folder), str(turns.at(step + 1).folder)]) == 0
    for step in (1, 2, 3, 4):
        assert main(["ckpt", "diff", str(stay.at(step).folder), str(turns.at(step).folder)]) == 0
    assert len(set(turns.metrics()["train/critic/loss"].values())) == 4, "nothing trained"


def test_a_mixture_of_experts_trains_with_its_experts_on_two_ranks(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "mixtral"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "num_key_value_heads": 2}
    tiny = AutoConfig.from_pretrained(resolve("builtin:tiny"))
    config = AutoConfig.for_model("mixtral", vocab_size=tiny.vocab_size, **sizes, **experts)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in resolve("builtin:tiny").iterdir():
        if not (folder / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    run = Run(tmp_path / "run", "grpo_tiny")
    model = f"policy.model_name={folder}"
    assert_passed(run.train(model, f"{POLICY}.enabled=true", f"{POLICY}.expert_model_parallel_size=2", *OVER_TWO))
    metrics = run.metrics()
    # The generator is another model, filled by name: were an expert at another's place, they would disagree.
    assert max(metrics["train/token_mult_prob_error"].values()) < 1.001
    assert min(metrics["train/grad_norm"].values()) > 0
    assert metrics["refit/version"][4] == metrics["train/optim_steps"][4] > 0
    experts_saved = {c.name for c in run.at(4).manifest.chunks if ".experts.3.w1" in c.name}
    assert len(experts_saved) == 2 * 4  # weight, two moments and step, in each layer


def test_a_checkpoint_of_another_precision_or_family_is_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path, "grpo_tiny")
    options = ("grpo.max_num_steps=1", f"{POLICY}.enabled=true")
    grads = f"{POLICY}.distributed_data_parallel_config.grad_reduce_in_fp32=false"
    assert_passed(run.train(*options, "policy.precision=bfloat16", grads))
    assert run.metrics()["train/grad_norm"][1] > 0
    ended = run.train(*options, "policy.precision=float32", "grpo.max_num_steps=2")
    assert_one_line(ended, "other weights than policy.model_name holds at policy.precision")
    qwen = make_model("qwen2", tmp_path)
    for file in resolve("builtin:tiny").iterdir():
        if file.name.startswith(("tokenizer", "special", "chat")):
            shutil.copy(file, qwen)
    assert_one_line(run.train(*options, f"policy.model_name={qwen}", "grpo.max_num_steps=2"), "qwen2")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("tensor_model_parallel_size=3",), "does not divide the model's attention heads"),
        (("tensor_model_parallel_size=2",), "does not divide the number of ranks (1)"),
        (("expert_model_parallel_size=2",), "the model has no experts"),
        (("converter_type=lama",), "it knows llama, qwen2, qwen3, mixtral"),
        (("sequence_parallel=true",), "sequence_parallel needs tensor_model_parallel_size above 1"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    keys = [f"{POLICY}.{override}" for override in ("enabled=true", *overrides)]
    ended = Run(tmp_path, "grpo_tiny").train(*keys)
    assert_one_line(ended, words)
