"""What saving costs on a CUDA device: staging, interference with a real training loop, disk, first save, memory.

    python benchmarks/gpu_ckpt.py --folder DIR [--gb 4.3] [--big-gb 20] [--json FILE]

A Llama-shaped model trains with AdamW in bf16 autocast; its fp32 weights and moments are the state. Blocks of steps
take turns: without saves, with every step staged, with a disk that writes all the time, and with both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.host_buffer import BufferPool, HostBuffer
from headwater.checkpoint.image_file import ImageFile
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.plan import Planner
from headwater.checkpoint.reader import verify
from headwater.checkpoint.staging import Stager, Staging
from headwater.config.schema import CheckpointingConfig

DEVICE = torch.device("cuda", 0)
BLOCK = 8
ROUNDS = 4


class Training:
    """A model of about `nbytes` of fp32 weights and moments that really trains."""

    def __init__(self, nbytes: float, batch: int, width: int = 1024) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        vocabulary = 32_000
        layer = 4 * width * width + 3 * width * 4 * width
        layers = max(1, round((nbytes / 12 - 2 * vocabulary * width) / layer))
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=16,
            vocab_size=vocabulary,
            attn_implementation="sdpa",
        )
        with DEVICE:
            self.model: Any = LlamaForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.fence = Fence()
        self.tokens = torch.randint(0, vocabulary, (batch, 512), device=DEVICE)
        self.losses: list[torch.Tensor] = []

    def step(self, save: Callable[[], None] | None = None) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.fence.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        if save is not None:
            save()

    def chunks(self) -> Iterator[Chunk]:
        for name, parameter in self.model.named_parameters():
            yield Chunk.whole(name, parameter)
            for key, value in self.optimizer.state[parameter].items():
                yield Chunk.whole(f"optimizer.state.{key}.{name}", value)

    def nbytes(self) -> int:
        return sum(chunk.tensor.numel() * chunk.tensor.element_size() for chunk in self.chunks())

    def move(self, device: torch.device) -> None:
        """Through the fence, to the host and back."""
        self.fence.wait()
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values() if value.dim()]
        for tensor in tensors:
            tensor.data = tensor.data.to(device)


class StageOnly:
    """Staging as a save does it, of buffers that are free again at once. seconds: of the copies from the device."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training = training
        self._planner, self._stager, self._pool = Planner(), Stager(), BufferPool(folder)
        self.seconds: list[float] = []
        self.calls: list[float] = []

    def save(self) -> None:
        begin = time.perf_counter()
        chunks = {"policy": list(self._training.chunks())}
        plans = {"policy": self._planner.plan("policy", chunks["policy"])}
        lease = self._pool.acquire({"policy": plans["policy"].size_bound}, True, 60.0)
        assert lease is not None

        def then(staging: Staging) -> None:
            assert staging.error is None, staging.error
            self.seconds.append(staging.copy_seconds)
            lease.release()

        self._training.fence.register(self._stager.stage("bench", chunks, plans, lease, then))
        self.calls.append(time.perf_counter() - begin)

    def close(self) -> None:
        self._stager.close()
        self._pool.close()


class Saving:
    """The product's own saves."""

    def __init__(self, training: Training, folder: Path, when_busy: str, prepare: bool = True) -> None:
        config = CheckpointingConfig(checkpoint_dir=str(folder), when_busy=when_busy, keep_latest_k=1)  # pyright: ignore[reportArgumentType]
        self._training = training
        self.manager = CheckpointManager(config, "bench", "bench")
        self.step = 0
        self.calls: list[float] = []
        if prepare:
            self.manager.prepare({"policy": training.nbytes()}, True, None)

    def save(self) -> bool:
        """False where it was skipped."""
        before = self.manager.take_news().metrics["checkpoint/skipped"]
        self.step += 1
        begin = time.perf_counter()
        self.manager.save(
            self.step, {"policy": self._training.chunks()}, {}, "", None, self.step, [self._training.fence]
        )
        self.calls.append(time.perf_counter() - begin)
        return self.manager.take_news().metrics["checkpoint/skipped"] == before


def block(training: Training, save: Callable[[], Any] | None) -> float:
    """Seconds a step. A save comes before the first step, and the last one's copies are not waited for, as in a run."""
    torch.cuda.synchronize()
    if save is not None:
        save()
    begin = time.perf_counter()
    for _ in range(BLOCK):
        training.step(save)
    torch.cuda.current_stream().synchronize()
    seconds = time.perf_counter() - begin
    training.fence.wait()
    return seconds / BLOCK


def disk_ceiling(folder: Path, buffer: HostBuffer, nbytes: int) -> float:
    """Bytes a second of 8 threads with direct writes of 16 MiB and one fsync, and nothing else."""
    from concurrent.futures import ThreadPoolExecutor

    path = folder / "ceiling.bin"
    path.unlink(missing_ok=True)
    image = buffer.view(nbytes)
    begin = time.perf_counter()
    file = ImageFile(path, image, nbytes, lambda _: None)
    with ThreadPoolExecutor(8) as workers:
        for piece in file.write(workers):
            piece.result()
    file.close()
    seconds = time.perf_counter() - begin
    path.unlink()
    return nbytes / seconds


def interference(training: Training, folder: Path, report: dict[str, Any]) -> None:
    for _ in range(6):
        training.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    training.step()
    print(f"launching a step takes {1e3 * (time.perf_counter() - begin):.1f} ms", flush=True)
    staging = StageOnly(training, folder)
    saving = Saving(training, folder / "writing", "skip")
    staging.save()
    training.fence.wait()
    saving.save()
    saving.manager.wait_committed()
    staging.seconds.clear(), staging.calls.clear(), saving.calls.clear()

    modes: dict[str, tuple[bool, Callable[[], Any] | None]] = {  # whether the disk is being written, and the save
        "no saves": (False, None),
        "every step stages": (False, staging.save),
        "the disk writes all the time": (True, None),
        "both": (True, staging.save),
        "saves whenever the writer is free": (True, saving.save),
    }
    times: dict[str, list[float]] = {name: [] for name in modes}
    for number in range(ROUNDS):
        order = list(modes.items())
        for name, (writing, save) in order[number % len(order) :] + order[: number % len(order)]:
            if writing:
                saving.save()  # the writer has work from the first step on
                training.fence.wait()
            seconds = block(training, save)
            busy = saving.manager.pending
            assert bool(busy) == writing or save == saving.save, "the disk was not written until the end"
            times[name].append(seconds)
            print(f"round {number}: {name} {1e3 * seconds:.1f} ms a step", flush=True)
            saving.manager.wait_committed()
    report["step_s"] = times
    base = times["no saves"]
    for name, values in times.items():
        longer = [value / without - 1 for value, without in zip(values, base, strict=True)]
        print(
            f"{name}: {1e3 * statistics.median(values):.1f} ms a step, {100 * statistics.median(longer):+.2f} %",
            flush=True,
        )
    nbytes = training.nbytes()
    report["copied_gb_s"] = [nbytes / seconds / 1e9 for seconds in staging.seconds]
    report["stall_ms"] = [1e3 * seconds for seconds in staging.calls]
    report["save_call_ms"] = [1e3 * seconds for seconds in saving.calls]
    calls, saves = report["stall_ms"], report["save_call_ms"]
    print(
        f"{nbytes / 1e9:.2f} GB in {len(list(training.chunks()))} chunks: call {statistics.median(calls):.1f} ms "
        f"(largest {max(calls):.1f}), of the whole save {statistics.median(saves):.1f} ms (largest {max(saves):.1f}); "
        f"copied at {statistics.median(report['copied_gb_s']):.1f} GB/s; "
        f"loss {training.losses[0].item():.2f} -> {training.losses[-1].item():.2f}",
        flush=True,
    )
    assert training.losses[-1] < training.losses[0], "nothing trained"
    staging.close()
    saving.manager.close()


def whole_saves(training: Training, folder: Path, count: int, report: dict[str, Any]) -> None:
    """Saves one after the other, each proven; disk ceilings measured between them."""
    saving = Saving(training, folder / "whole", "wait")
    time.sleep(training.nbytes() / 1e9)  # as a run's first rollout gives it
    nbytes = training.nbytes()
    spare = HostBuffer(folder)
    spare.reserve(min(nbytes, 4 << 30) // 4096 * 4096, pin=False)
    rows = []
    for _ in range(count):
        training.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        saving.save()
        saving.manager.wait_staged()
        staged = time.perf_counter() - begin
        saving.manager.wait_committed()
        committed = time.perf_counter() - begin
        news = saving.manager.take_news().metrics
        ceiling = disk_ceiling(folder, spare, len(spare.view(1 << 62)))
        row = {
            "call_ms": 1e3 * saving.calls[-1],
            "staged_s": staged,
            "copied_gb_s": nbytes / news["checkpoint/copy_s"] / 1e9,
            "committed_s": committed,
            "write_gb_s": nbytes / news["checkpoint/write_s"] / 1e9,
            "ceiling_gb_s": ceiling / 1e9,
        }
        rows.append(row)
        print(", ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
    report.setdefault("whole_saves", []).append({"bytes": nbytes, "rows": rows})
    ratios = {key: rows[0][key] / rows[1][key] for key in ("call_ms", "staged_s", "committed_s")}
    of_disk = statistics.median(row["write_gb_s"] / row["ceiling_gb_s"] for row in rows)
    text = ", ".join(f"{key} {value:.2f}" for key, value in ratios.items())
    print(f"{nbytes / 1e9:.1f} GB: first save over second: {text}; write over ceiling {of_disk:.2f}", flush=True)
    newest = saving.manager.latest()
    assert newest is not None
    assert verify(newest) == []
    live = {chunk.name: chunk.tensor for chunk in training.chunks()}
    reader = newest.component("policy")
    for name in list(live)[:: max(1, len(live) // 20)]:
        assert torch.equal(reader.read(name), live[name].cpu()), name
    spare.close()
    saving.manager.close()
    shutil.rmtree(folder / "whole")


def memory_loop(gb: float, folder: Path, arm: str) -> None:
    """Prints the device's used bytes after each offload."""
    training = Training(gb * 1e9, 8)
    training.step()  # has the moments made, whose bytes are prepared for
    saving = Saving(training, folder / "memory", "wait") if arm != "no checkpoints" else None
    used = []
    for _ in range(5):
        training.step(saving.save if saving and arm == "saves" else None)
        training.move(torch.device("cpu"))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
        training.move(DEVICE)
    if saving:
        assert saving.manager.writer_pid is not None
        maps = Path(f"/proc/{saving.manager.writer_pid}/maps").read_text()
        assert "libcuda" not in maps, "the writer holds CUDA"
        saving.manager.close()
    print(json.dumps(used))


def memory(gb: float, folder: Path, report: dict[str, Any]) -> None:
    """The same loop three times: without checkpoints, with all prepared for saves that do not come, and with saves."""
    used: dict[str, list[int]] = {}
    for arm in ("no checkpoints", "no saves", "saves"):
        words = [sys.executable, __file__, "--folder", str(folder), "--gb", str(gb), "--memory-loop", arm]
        output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        used[arm] = json.loads(output.splitlines()[-1])
    report["device_bytes_after_offload"] = used
    for arm in ("no checkpoints", "no saves"):
        more = [(saves - without) / 2**20 for saves, without in zip(used["saves"], used[arm], strict=True)]
        print(f"device memory after each offload, MiB more than with {arm}: {[round(x, 2) for x in more]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=4.3)
    parser.add_argument("--big-gb", type=float, default=20.0)
    parser.add_argument("--batch", type=int, default=40, help="sequences of 512 tokens a step (default: 40)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", default="interference,whole,memory,big")
    parser.add_argument("--memory-loop", choices=["no checkpoints", "no saves", "saves"])
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.memory_loop:
        memory_loop(args.gb, args.folder, args.memory_loop)
        return
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
    }
    parts = args.parts.split(",")
    if "memory" in parts:
        memory(args.gb, args.folder, report)
    if "interference" in parts or "whole" in parts:
        training = Training(args.gb * 1e9, args.batch)
        if "interference" in parts:
            interference(training, args.folder, report)
        if "whole" in parts:
            whole_saves(training, args.folder, 4, report)
        del training
        torch.cuda.empty_cache()
    if "big" in parts:
        training = Training(args.big_gb * 1e9, 8)
        for _ in range(2):
            training.step()
        whole_saves(training, args.folder, 3, report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
