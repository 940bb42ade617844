"""What must hold on a CUDA device as it does on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.checkpoint import digest as digest_module
from headwater.checkpoint.digest import BLOCK_BYTES, device_sums, digest, finish
from headwater.cli.main import main
from headwater.config.load import load_config
from headwater.data.types import Problem, Prompt, SamplingParams
from headwater.engines.generate.native import NativeGenerator
from headwater.engines.torch.engine import TorchEngine
from headwater.metrics.sinks import read_jsonl
from headwater.models.resolve import load_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("length", [0, 1, 7, 65_536 * 8 + 3])
def test_the_digest_is_the_same_on_both_devices(dtype: torch.dtype, length: int) -> None:
    tensor = torch.randint(0, 2, (length,)).to(dtype)
    assert digest(tensor.cuda()) == digest(tensor)


def test_digests_of_many_tensors_in_one_launch_are_those_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [0, 1, 7, 8, 9, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 5, 3 * BLOCK_BYTES + 24]
    on_host = [torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator) for length in lengths]
    on_host += [torch.randn(33, 77, generator=generator).bfloat16(), torch.tensor(3.0)]
    assert digest_module._kernel_on(torch.zeros(1, device="cuda").device) is not None, "the plain path took its place"
    for _ in range(2):  # the second time with what the first left in the cache, and at other addresses
        tensors = [tensor.cuda() for tensor in on_host]
        tensors += [tensors[-2].t(), tensors[-2].view(-1)[1:], tensors[9][5:]]
        totals = device_sums(tensors).tolist()
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        assert list(map(finish, totals, sizes)) == [digest(tensor.cpu()) for tensor in tensors]
        on_host = [tensor.flip(0) if tensor.dim() else tensor + 1 for tensor in on_host]


def test_the_digest_of_a_view_is_that_of_its_elements() -> None:
    tensor = torch.randn(300, 500, device="cuda")
    assert digest(tensor.t()) == digest(tensor.t().contiguous().cpu())


def test_generation_agrees_with_training(tiny_model: Path) -> None:
    config = load_config("grpo_tiny").config
    engine = TorchEngine(config.policy, tiny_model, torch.device("cuda"))
    generator = NativeGenerator(engine.model, load_tokenizer(tiny_model), max_batch_size=64)
    prompt = Prompt(0, Problem(0, [{"role": "user", "content": "x"}]), tuple(b"some prompt"))
    for completion in generator.generate([prompt], 4, SamplingParams(16))[0]:
        ids = torch.tensor([prompt.token_ids + completion.token_ids], device="cuda")
        with torch.no_grad():
            logprobs = engine.model(ids).logits[0, len(prompt.token_ids) - 1 : -1].float().log_softmax(-1).cpu()
        expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(completion.logprobs, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_trains_saves_and_resumes(tmp_path: Path, precision: str, capsys) -> None:
    def train(steps: int) -> int:
        folders = [f"checkpointing.checkpoint_dir={tmp_path}/c", f"logger.log_dir={tmp_path}/l"]
        kl = "loss_fn.reference_policy_kl_penalty=0.01"
        words = [*folders, kl, f"policy.precision={precision}", f"grpo.max_num_steps={steps}", "cluster.device=cuda"]
        return main(["train", "grpo_tiny", *words])

    assert train(2) == 0
    assert train(4) == 0
    assert "resumed from" in capsys.readouterr().out
    metrics = read_jsonl(tmp_path / "l" / "metrics.jsonl")
    assert metrics["train/optim_steps"][4] == 4
    assert min(metrics["train/reward_std"].values()) > 0
    assert min(metrics["train/grad_norm"].values()) > 0
    assert max(metrics["train/token_mult_prob_error"].values()) < 1.05
    assert metrics["train/kl_penalty"][4] > 0
    assert main(["ckpt", "verify", str(tmp_path / "c")]) == 0


def test_offload_and_onload_keep_every_value(tiny_model: Path, recorded_rollout) -> None:
    config = load_config("grpo_tiny", ["policy.precision=bfloat16"]).config
    engine = TorchEngine(config.policy, tiny_model, torch.device("cuda"))

    def step() -> None:
        engine.forward_backward(recorded_rollout, lambda logprobs, _: (-logprobs.sum(), {}), 100.0)
        engine.optim_step()

    step()
    before = {chunk.name: digest(chunk.tensor) for chunk in engine.state_chunks()}
    engine.offload()
    assert all(chunk.tensor.device.type == "cpu" for chunk in engine.state_chunks())
    assert {chunk.name: digest(chunk.tensor) for chunk in engine.state_chunks()} == before
    engine.onload()
    assert all(chunk.tensor.device.type == "cuda" for chunk in engine.state_chunks())
    step()
    after = {chunk.name: digest(chunk.tensor) for chunk in engine.state_chunks()}
    assert all(after[name] != value for name, value in before.items() if "exp_avg" in name)
