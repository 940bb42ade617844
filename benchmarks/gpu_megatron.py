"""A training step of SmolLM2's shape by megatron-core and by the torch backend, in turns, on one CUDA device.

python benchmarks/gpu_megatron.py [--rounds 4] [--layers 30]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headwater.config.load import load_config
from headwater.data.types import TrainSequence
from headwater.engines.megatron.engine import MegatronEngine
from headwater.engines.torch.engine import TorchEngine
from headwater.workers.train import PolicyWorker

VOCABULARY, PROMPT, COMPLETION = 49_152, 128, 256
OVERRIDES = (
    "policy.precision=bfloat16",
    "policy.train_micro_batch_size=32",
    "policy.train_global_batch_size=64",
    "policy.sequence_packing.max_tokens_per_row=4096",
    "grpo.num_generations_per_prompt=8",
    "grpo.num_prompts_per_step=8",
)


def sequences(count: int) -> list[TrainSequence]:
    """Groups of eight completions of a prompt, always the same."""
    generator = torch.Generator().manual_seed(0)
    found, prompt = [], torch.empty(0)
    for index in range(count):
        if index % 8 == 0:
            prompt = torch.randint(0, VOCABULARY, (PROMPT,), generator=generator)
        logprobs = -3 + torch.rand(COMPLETION, generator=generator)
        found.append(
            TrainSequence(
                group=index // 8,
                prompt_ids=prompt,
                completion_ids=torch.randint(0, VOCABULARY, (COMPLETION,), generator=generator),
                advantages=torch.randn((), generator=generator).repeat(COMPLETION),
                generation_logprobs=logprobs,
                sampling_logprobs=logprobs,
            )
        )
    return found


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=30)
    args = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    store: Any = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=args.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    device, batch = torch.device("cuda", 0), sequences(64)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
        plain = load_config("grpo_tiny", OVERRIDES).config
        enabled = load_config("grpo_tiny", [*OVERRIDES, "policy.megatron_cfg.enabled=true"]).config
        engines: dict[str, Any] = {
            "torch": TorchEngine(plain.policy, Path(folder), device),
            "megatron": MegatronEngine(enabled.policy, Path(folder), device),
        }
    speeds: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, engine in engines.items():
            worker = PolicyWorker(engine, None, plain.loss_fn, skip_without_signal=False)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            worker.forward_backward(batch)
            norm = worker.optim_step().grad_norm
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            speeds[name] = len(batch) * COMPLETION / seconds
            print(f"{name}: {seconds:.3f} s, {speeds[name]:.0f} completion tokens/s, norm {norm:.4f}", flush=True)
    print(f"megatron over torch, last steps: {speeds['megatron'] / speeds['torch']:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
