"""`headwater train` of adapters with megatron-core, and what of its checkpoints PEFT and transformers load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train import OVER_TWO, POLICY, VALUE, Run, assert_passed

from headwater.cli.main import main
from headwater.models.resolve import load_model, resolve

pytest.importorskip("megatron.core", reason="needs the extra megatron, which make test-slow installs")
pytest.importorskip("peft", reason="needs the extra dev")
pytestmark = pytest.mark.slow
LORA = (f"{POLICY}.enabled=true", f"{POLICY}.peft.enabled=true", f"{POLICY}.peft.rank=4")
FP32 = "policy.precision=float32"
LEARNS = (*LORA, FP32, "policy.optimizer.lr=0.01")


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 33)[None]).logits  # pyright: ignore[reportCallIssue]


def errors(ended: subprocess.CompletedProcess[str]) -> list[str]:
    assert ended.returncode == 2, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr
    return [line for line in ended.stderr.splitlines() if line.startswith("headwater: error:")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps of adapters in fp32, each saved."""
    run = Run(tmp_path_factory.mktemp("lora"), "grpo_tiny")
    each = ("checkpointing.save_period=1", "checkpointing.keep_latest_k=null", "grpo.max_num_steps=3")
    assert_passed(run.train(*LEARNS, *each, "loss_fn.reference_policy_kl_penalty=0.1"))
    return run


def test_grpo_trains_adapters_beside_their_reference_and_saves_fresh_ones(trained: Run) -> None:
    metrics = trained.metrics()
    assert set(metrics["train/num_trainable_parameters"].values()) == {
        sum(chunk_size for chunk_size in adapter_sizes(trained).values())
    }
    assert min(metrics["train/grad_norm"].values()) > 0
    assert metrics["train/kl_penalty"][1] == pytest.approx(0.0, abs=1e-6)
    assert metrics["train/kl_penalty"][3] > 1e-6
    # What generates has the adapters merged; that its weights are those is seen by their probabilities.
    assert max(metrics["train/token_mult_prob_error"].values()) < 1.001
    for step in (1, 2):
        assert main(["ckpt", "freshness", str(trained.at(step).folder), str(trained.at(step + 1).folder)]) == 0
    assert main(["ckpt", "verify", str(trained.at(3).folder)]) == 0


def adapter_sizes(run: Run) -> dict[str, int]:
    chunks = [chunk for chunk in run.at(3).manifest.chunks if not chunk.name.startswith("optimizer.")]
    assert chunks
    assert all(".lora_A." in chunk.name or ".lora_B." in chunk.name for chunk in chunks)
    return {chunk.name: torch.Size(chunk.global_shape).numel() for chunk in chunks}


def test_an_exported_adapter_gives_the_logits_of_the_merged_model(trained: Run, tmp_path: Path) -> None:
    from peft import PeftModel

    checkpoint = str(trained.at(3).folder)
    assert main(["ckpt", "export", checkpoint, str(tmp_path / "merged"), "--to", "hf"]) == 0
    assert main(["ckpt", "export", checkpoint, str(tmp_path / "adapter"), "--to", "peft"]) == 0
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (4, 16)
    assert described["base_model_name_or_path"] == "builtin:tiny"
    base = resolve("builtin:tiny")
    before = logits(load_model(base, torch.float32))
    merged = logits(load_model(tmp_path / "merged", torch.float32))
    adapted = PeftModel.from_pretrained(load_model(base, torch.float32), tmp_path / "adapter")
    assert torch.allclose(logits(adapted), merged, atol=1e-4)
    assert (merged - before).abs().max() > 0.01, "nothing was learnt"
    assert sum("lora_" in name for name in adapted.state_dict()) == len(adapter_sizes(trained))


def test_export_needs_neither_megatron_nor_peft(trained: Run, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['megatron'] = sys.modules['megatron.core'] = sys.modules['peft'] = None\n"
        "from headwater.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    for target in ("hf", "peft"):
        command = ["ckpt", "export", str(trained.at(3).folder), str(tmp_path / target), "--to", target]
        ended = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr


def test_adapters_are_not_merged_into_other_weights(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(resolve("builtin:tiny"), torch.float32)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    model.save_pretrained(tmp_path / "other")
    command = ["ckpt", "export", str(trained.at(3).folder), str(tmp_path / "out"), "--to", "hf"]
    assert main([*command, "--model", str(tmp_path / "other")]) == 2
    assert "does not hold the weights that" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_of_adapters_goes_on_over_two_ranks(trained: Run) -> None:
    cut = (*OVER_TWO, f"{POLICY}.tensor_model_parallel_size=2", f"{POLICY}.sequence_parallel=true")
    went_on = trained.train(*LEARNS, *cut, "grpo.max_num_steps=4", "loss_fn.reference_policy_kl_penalty=0.1")
    assert_passed(went_on)
    assert "at step 3" in went_on.stdout
    metrics = trained.metrics()
    assert metrics["train/token_mult_prob_error"][4] < 1.001
    assert metrics["train/optim_steps"][4] > metrics["train/optim_steps"][3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((FP32, f"{POLICY}.enabled=true"), ("adapters (rank 4, alpha 16", "this run trains whole weights")),
        ((FP32,), ("this run trains whole weights",)),
        ((*LORA, FP32, f"{POLICY}.peft.alpha=8"), ("alpha 16", "this run trains adapters (rank 4, alpha 8")),
        ((*LORA, FP32, f"{POLICY}.peft.rank=2"), ("rank 4", "this run trains adapters (rank 2")),
        ((*LORA, FP32, f"{POLICY}.peft.target_modules=[linear_qkv]"), ("on linear_qkv)",)),
    ],
)
def test_a_run_with_other_adapters_does_not_go_on(trained: Run, options: tuple[str, ...], words: tuple[str]) -> None:
    (line,) = errors(trained.train(*options, "grpo.max_num_steps=5"))
    assert all(word in line for word in (*words, "policy.megatron_cfg.peft", "checkpointing.checkpoint_dir"))


def test_whole_weights_do_not_go_on_as_adapters_and_have_none_to_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, "grpo_tiny")
    assert_passed(run.train("grpo.max_num_steps=1"))
    (line,) = errors(run.train(*LORA, "grpo.max_num_steps=2"))
    assert "holds whole weights of the policy, this run trains adapters (rank 4" in line
    assert main(["ckpt", "export", str(run.at(1).folder), str(tmp_path / "out"), "--to", "peft"]) == 2
    assert "policy has no adapters" in capsys.readouterr().err


def test_policy_and_value_model_train_adapters_in_bf16_over_a_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, "ppo_tiny")
    keys = ("enabled=true", "pipeline_model_parallel_size=2", "peft.enabled=true")
    cut = [f"{group}.{key}" for group in (POLICY, VALUE) for key in keys]
    assert_passed(run.train(*cut, *OVER_TWO, "policy.precision=bfloat16", "value.precision=bfloat16"))
    metrics = run.metrics()
    assert len(set(metrics["train/critic/loss"].values())) == 4, "nothing trained"
    assert max(metrics["train/token_mult_prob_error"].values()) < 1.05
    assert run.at(4).components() == ["policy", "value"]
    of_value = {chunk.name for chunk in run.at(4).manifest.chunks if chunk.component == "value"}
    weights = {name for name in of_value if not name.startswith("optimizer.")}
    assert {"value_head.weight", "value_head.bias"} == {name for name in weights if "lora_" not in name}
    export = ["ckpt", "export", str(run.at(4).folder), str(tmp_path / "value"), "--to", "peft", "--component", "value"]
    assert main(export) == 2
    assert "only a language model's adapters can be exported" in capsys.readouterr().err
