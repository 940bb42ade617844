"""A GRPO-like loop that saves and offloads at every step: without saves, by native and by NVRx, in turns, on one GPU.

python benchmarks/gpu_nvrx.py --folder DIR [--steps 6] [--rounds 2] [--hidden 1024] [--layers 12] [--generation-s 1.5]

A step: the policy comes back to the device, trains, is saved and leaves again; then something else has the device, as
generation does. Each strategy is NVRx's or native's under the same fence. What is retained is what the whole device
holds while the policy is away, beyond what it holds without saves. A stall holds the wait for the save before, where
that is still being written.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_megatron import OVERRIDES, VOCABULARY, sequences

from headwater.checkpoint.manager import CheckpointManager
from headwater.config.load import load_config
from headwater.config.schema import CheckpointingConfig
from headwater.engines.megatron.engine import MegatronEngine
from headwater.workers.train import PolicyWorker

ARMS = ("no saves", "native", "nvrx")


class Loop:
    """One policy and what is measured of its steps. generation: seconds that something else has the device."""

    def __init__(self, model: Path, generation_s: float) -> None:
        self.device = torch.device("cuda", 0)
        config = load_config("grpo_tiny", [*OVERRIDES, "policy.megatron_cfg.enabled=true"]).config
        self.engine = MegatronEngine(config.policy, model, self.device)
        self.worker = PolicyWorker(self.engine, None, config.loss_fn, skip_without_signal=False)
        self.batch = sequences(64)
        self._matrix = torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16)
        self._products = 1
        self._products = max(1, int(generation_s / self._timed_products(40) * 40))

    def _timed_products(self, count: int) -> float:
        for _ in range(2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(count):
                torch.mm(self._matrix, self._matrix)
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def step(self, number: int, manager: CheckpointManager | None) -> dict[str, float]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.engine.onload()
        norm = 0.0
        for _ in range(2):
            self.worker.forward_backward(self.batch)
            norm += self.worker.optim_step().grad_norm
        assert norm > 0, "nothing trained"
        torch.cuda.synchronize()
        before_save = time.perf_counter()
        if manager is not None:
            components = {"policy": self.engine.state_chunks()}
            manager.save(number, components, {}, "", None, number, [self.engine.fence], may_skip=False)
        stall = time.perf_counter() - before_save
        busy = manager.take_news().metrics["checkpoint/busy_wait_s"] if manager is not None else 0.0
        self.engine.offload()
        used = _used(self.device)
        self._timed_generation()
        waited = self.engine.fence.take_waited_s()
        took = time.perf_counter() - started
        return {"step": took, "stall": stall, "busy": busy, "fence": waited, "used": used}

    def _timed_generation(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)
        torch.cuda.synchronize()

    def nbytes(self) -> int:
        return sum(chunk.tensor.nbytes for chunk in self.engine.state_chunks())


def _used(device: torch.device) -> float:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free)


def run(arm: str, loop: Loop, folder: Path, steps: int) -> list[dict[str, float]]:
    """Measures of each step but the first two, which start processes and make buffers."""
    manager = None
    if arm != "no saves":
        config = CheckpointingConfig(checkpoint_dir=str(folder), strategy=arm, keep_latest_k=1)
        manager = CheckpointManager(config, "bench", "bench")
        manager.prepare({"policy": loop.engine.checkpoint_bytes}, True, None)
        time.sleep(8)  # what is made ready in the background is not what is measured
    found = []
    for number in range(1, steps + 3):
        measured = loop.step(number, manager)
        if number > 2:
            found.append(measured)
    if manager is not None:
        pid = manager.writer_pid
        manager.wait_committed()
        assert manager.writer_pid == pid, "the writer was replaced"
        metrics = manager.take_news().metrics
        assert metrics["checkpoint/writer_restarts"] == 0
        manager.close()
    shutil.rmtree(folder, ignore_errors=True)
    gc.collect()
    torch.cuda.ipc_collect()
    return found


def table(measures: dict[str, list[dict[str, float]]]) -> str:
    """Medians of each strategy over its steps so far, and how it differs from the loop without saves."""
    middle = {arm: {key: statistics.median(m[key] for m in some) for key in some[0]} for arm, some in measures.items()}
    alone, lines = middle["no saves"], []
    for arm, one in middle.items():
        longest = max(m["stall"] for m in measures[arm])
        more, kept = one["step"] / alone["step"] - 1, one["used"] - alone["used"]
        lines.append(
            f"{arm:9} stall {1e3 * one['stall']:8.1f} ms, longest {1e3 * longest:8.1f}, of it the save before "
            f"{1e3 * one['busy']:7.1f}; fence {1e3 * one['fence']:7.1f} ms; step {one['step']:6.3f} s, "
            f"{100 * more:+6.1f} %; retained {kept / 1e6:8.1f} MB"
        )
    return "\n".join(lines)


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--generation-s", type=float, default=1.5)
    args = parser.parse_args()
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as made:
        model = Path(made) / "model"
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 11 // 4,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 128,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
        loop = Loop(model, args.generation_s)
    for number in range(2):
        loop.step(number, None)
    versions = f"NVRx {importlib.metadata.version('nvidia-resiliency-ext')}, torch {torch.__version__}"
    print(f"{loop.nbytes() / 1e9:.2f} GB of state, {args.steps} steps of each in a round, {versions}", flush=True)
    measures: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(1, args.rounds + 1):
        for arm in ARMS:
            measures[arm] += run(arm, loop, args.folder / arm, args.steps)
            print(f"round {number}, {arm}\n{table(measures)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
