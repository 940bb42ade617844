"""The rows of the freshness matrix: paths on which the state of Megatron engines moves, each around saves.

Every path is the engines' own, in the order in which a run takes its steps. A run with a teacher does not exist yet:
of distillation the row has what the engines would do.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "engines")]

from parallel_ranks import rollout
from transformers import LlamaConfig, LlamaForCausalLM

from headwater.checkpoint.byte_digest import digest_many
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.compare import check_freshness
from headwater.checkpoint.digest import digest, digest_all
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.config.load import load_config
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError
from headwater.models.quiet import quiet_transformers

VOCABULARY = 8192
BYTES_PER_PARAMETER = 14  # bf16 weights; fp32 masters and moments
VALUE_SHARE = 4  # the value model is this much smaller than the policy
SMALLEST_CONTEXT = 64 * 2**20
OPTIMIZER_ROLES = ("exp_avg", "exp_avg_sq", "param", "step")
NAMED = 3
Key = tuple[str, str, tuple[int, ...]]


class Models:
    """Random Llamas in folders, and engines of them. megabytes: of the policy's state in a checkpoint."""

    def __init__(self, folder: Path, megabytes: float, device: torch.device) -> None:
        self.device = device
        words = ["policy.precision=bfloat16", "policy.max_total_sequence_length=128"]
        self._config = load_config("ppo_megatron", words).config
        self._paths = {
            "policy": _make_model(folder / "policy", megabytes),
            "value": _make_model(folder / "value", megabytes / VALUE_SHARE),
        }
        self.sequences = rollout(VOCABULARY)[:8]

    def engine(self, name: str, *, trainable: bool = True) -> Any:
        from headwater.engines.megatron.engine import MegatronEngine, MegatronValueEngine

        kind, config = {
            "policy": (MegatronEngine, self._config.policy),
            "value": (MegatronValueEngine, self._config.value),
        }[name]
        assert config is not None
        return kind(config, self._paths[name], self.device, trainable=trainable, moves_on_host=True)

    def train(self, engine: Any) -> None:
        """One step, which moves every moment."""
        before = moments(engine)
        engine.forward_backward(self.sequences, lambda outputs, _: (-outputs.sum(), {}), 100.0)
        engine.optim_step()
        after = moments(engine)
        assert after, "there are no moments"
        assert all(value != before.get(key) for key, value in after.items()), "nothing trained"


def _make_model(path: Path, megabytes: float) -> Path:
    parameters = megabytes * 1e6 / BYTES_PER_PARAMETER
    hidden = 32
    while hidden < 2048 and 2 * hidden * VOCABULARY <= parameters / 2:
        hidden *= 2
    heads = hidden // 16 if hidden < 1024 else hidden // 64
    of_layer = 3 * hidden**2 + 9 * hidden**2  # attention with half as many keys; an MLP three times as wide
    layers = max(1, round((parameters - hidden * VOCABULARY) / of_layer))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    with quiet_transformers():
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def live_digests(components: dict[str, list[Chunk]]) -> dict[Key, int]:
    flat = [(name, chunk) for name, chunks in components.items() for chunk in chunks]
    found = digest_all([chunk.tensor for _, chunk in flat])
    return {(name, chunk.name, chunk.offset): value for (name, chunk), value in zip(flat, found, strict=True)}


def moments(engine: Any) -> dict[Key, int]:
    return live_digests({"": [chunk for chunk in engine.state_chunks() if ".exp_avg" in chunk.name]})


def stored_digests(checkpoint: Checkpoint) -> dict[Key, int]:
    """Of the bytes that lie on the disk, whatever the manifest says of their digests."""
    files = {
        name: np.memmap(checkpoint.folder / name, np.uint8, "r")
        for name in {chunk.file for chunk in checkpoint.manifest.chunks}
    }
    chunks = checkpoint.manifest.chunks
    found = digest_many([files[chunk.file][chunk.begin : chunk.end] for chunk in chunks])
    return {(c.component, c.name, c.offset): value for c, value in zip(chunks, found, strict=True)}


def used_memory(device: torch.device) -> int:
    """Bytes that the device itself counts, of all processes; 0 on a CPU."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def cuda_of(pid: int | None) -> dict[str, Any]:
    """What a process has of CUDA."""
    process = Path(f"/proc/{pid}")
    if pid is None or not process.exists():
        return {"context": None}
    library = "libcuda.so" in (process / "maps").read_text()
    devices = set()
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):
            devices.add(str(descriptor.readlink()))
    opened = sorted(name for name in devices if name.startswith("/dev/nvidia"))
    return {"context": bool(library and opened), "libcuda": library, "opened": opened, "smi": _listed_memory(pid)}


def _listed_memory(pid: int) -> str | None:
    """As the driver's tool lists it; it may not know the process by this number."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    said = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30).stdout
    return next((line for line in said.splitlines() if line.split(",")[0].strip() == str(pid)), None)


class Managed:
    """Saves by a CheckpointManager. lets_go: whether handles are closed where memory moves."""

    def __init__(
        self, strategy: str, root: Path, sizes: dict[str, int], device: torch.device, *, lets_go: bool = True
    ) -> None:
        self.root = root
        self._manager = CheckpointManager(
            CheckpointingConfig(checkpoint_dir=str(root), strategy=strategy, keep_latest_k=2), "run", "model"
        )
        self._saver: Any = self._manager._saver
        self._engines: list[Any] = []
        if not lets_go:
            self._saver.remove_for_test()
        self._manager.prepare(sizes, device.type == "cuda", None)
        if strategy == "nvrx":
            self._saver._start()

    @property
    def pid(self) -> int | None:
        return self._manager.writer_pid

    @property
    def restarts(self) -> int:
        return self._saver.writer_restarts

    def save(self, step: int, components: dict[str, list[Chunk]], engines: dict[str, Any]) -> None:
        self._manager.save(step, components, {}, "", None, step, [engine.fence for engine in engines.values()])

    def commit(self, step: int) -> Path:
        """Raises HeadwaterError where the save is refused."""
        self._manager.wait_committed()
        (folder,) = self.root.glob(f"step_{step:06d}*")
        return folder

    def compared(self, old: Path) -> None:
        """Retention removes it."""

    def settle_all(self) -> None:
        """Have nothing of a row in flight, whatever became of it."""
        with suppress(HeadwaterError):
            self._manager.wait_committed()

    def close(self) -> None:
        self._manager.close()


class Control:
    """Saves by NVRx without a lifecycle."""

    restarts = 0

    def __init__(self, root: Path) -> None:
        from plain_nvrx import PlainNvrx

        root.mkdir(parents=True)
        self._plain = PlainNvrx(root)

    @property
    def pid(self) -> int | None:
        return self._plain.pid

    def save(self, step: int, components: dict[str, list[Chunk]], engines: dict[str, Any]) -> None:
        # NVRx moves host tensors that it is given into shared memory, where torch cannot empty and refill them.
        copied = {
            name: [c if c.tensor.is_cuda else c._replace(tensor=c.tensor.clone()) for c in chunks]
            for name, chunks in components.items()
        }
        self._plain.save(step, copied)

    def commit(self, step: int) -> Path:
        self._plain.finalize()
        return self._plain.folder(step)

    def compared(self, old: Path) -> None:
        shutil.rmtree(old)

    def close(self) -> None:
        self._plain.close()


class Savers:
    """What saves the rows of one arm: one manager for all, whose writer lives through them; control makes its own.

    context: bytes that the writer's process takes on the device. saves: made before the present row.
    """

    def __init__(self, arm: str, root: Path, device: torch.device) -> None:
        self.arm, self.root = arm, root
        self._device = device
        self._kept: Managed | None = None
        self.context = self.saves = 0

    def of_row(self, sizes: dict[str, int], before: int) -> Managed | Control:
        """before: what the device holds, with the row's engines away."""
        if self._kept is not None:
            return self._kept
        if self.arm == "control":
            saver: Managed | Control = Control(self.root)
            self.context = 0
        else:
            strategy = "native" if self.arm == "native" else "nvrx"
            saver = Managed(strategy, self.root, sizes, self._device, lets_go=self.arm != "proof-alone")
            self._kept = saver
        if self.arm == "native" or self._device.type != "cuda":
            return saver
        if used_memory(self._device) - before < SMALLEST_CONTEXT:  # it begins one at its first save
            tensor = torch.zeros(1, device=self._device)
            saver.save(0, {"policy": [Chunk.whole("first", tensor)]}, {})
            saver.commit(0)
        self.context = used_memory(self._device) - before
        return saver

    def end_row(self, saver: Managed | Control, failed: bool) -> None:
        """Keep it for the next row, where it can be."""
        if isinstance(saver, Managed) and not failed:
            saver.settle_all()
        else:
            self._kept, self.context = None, 0
            saver.close()
            shutil.rmtree(self.root, ignore_errors=True)

    def close(self) -> None:
        if self._kept is not None:
            self.end_row(self._kept, True)


class Run:
    """One row in one arm: makes engines, saves and proves them, and measures. stage: what it does now."""

    def __init__(self, row: str, models: Models, saves: int, savers: Savers) -> None:
        self._savers, self._models, self._saves = savers, models, saves
        self._first = savers.saves
        self.sequences = models.sequences
        self.stage = "making engines"
        self.engines: dict[str, Any] = {}
        self._others: list[Any] = []
        self._saver: Managed | Control | None = None
        self._bases: dict[str, int] = {}
        self._step = 0
        self._pending: dict[Key, int] | None = None
        self._newest: Path | None = None
        self.told: dict[str, Any] = {"arm": savers.arm, "row": row, "nvrx": nvrx_version(), "error": None}
        self.told |= {"saves": 0, "seconds": [], "pairs": [], "proven": [], "problems": [], "refusals": []}
        self.told |= {"used": [], "pids": [], "writer": None, "context_bytes": 0, "device_bytes": 0, "state_bytes": 0}

    def begin(self, *names: str, untrained: tuple[str, ...] = (), others: int = 0, partly: bool = False) -> list[Any]:
        """Engines, trained by a step, then `others` frozen ones; and what the device holds without any save.

        partly: also with the policy's optimizer away alone.
        """
        models = self._models
        for name in names:
            self.engines[name] = engine = models.engine(name)
            self.told["state_bytes"] += engine.checkpoint_bytes
            if name not in untrained:
                self.train(name)
        self._others = [models.engine("policy", trainable=False) for _ in range(others)]
        self.stage = "first measure"
        for other in () if partly else self._others:
            other.offload()
        if partly:
            self.engines["policy"].offload_optimizer()
            self._bases["optimizer"] = used_memory(models.device)
        for engine in self.engines.values():
            engine.offload()
        self._bases["all"] = used_memory(models.device)
        self._start_saver()
        for engine in self.engines.values():
            engine.onload()
        return [*self.engines.values(), *self._others]

    def _start_saver(self) -> None:
        self.stage = "starting the writer"
        sizes = {name: engine.checkpoint_bytes for name, engine in self.engines.items()}
        there = self._savers.context
        self._saver = self._savers.of_row(sizes, self._bases["all"])
        self._bases = {what: held - there for what, held in self._bases.items()}
        self.told["context_bytes"] = self._savers.context

    def train(self, name: str) -> None:
        self.stage = f"training {name}"
        self._models.train(self.engines[name])
        self.stage = "the path"

    def steps(self) -> Iterator[int]:
        """One for each save; the last save is settled when they end."""
        for step in range(1, self._saves + 1):
            self._step, self.stage = step, "the path"
            yield step
        self.settle()

    def save(self) -> None:
        """Begin one; the one before it is settled first."""
        assert self._saver is not None
        self.settle()
        self.stage = f"save {self._step}"
        components = {name: list(engine.state_chunks()) for name, engine in self.engines.items()}
        flat = [chunk for chunks in components.values() for chunk in chunks]
        of_device = sum(chunk.tensor.nbytes for chunk in flat if chunk.tensor.is_cuda)
        self.told["device_bytes"] = max(self.told["device_bytes"], of_device)
        self._pending = live_digests(components)
        started = time.perf_counter()
        self._saver.save(self._first + self._step, components, self.engines)
        self.told["seconds"].append(round(time.perf_counter() - started, 4))
        self.told["saves"] += 1
        self._savers.saves = self._first + self._step
        self.told["pids"].append(self._saver.pid)
        self.stage = "the path"

    def settle(self) -> None:
        """Wait for the save that was begun, compare it with the one before it, and with what was live."""
        if self._pending is None:
            return
        assert self._saver is not None
        live, self._pending = self._pending, None
        step = self._savers.saves
        self.stage = f"commit {step}"
        if self.told["writer"] is None:
            self.told["writer"] = cuda_of(self._saver.pid)
        try:
            folder = self._saver.commit(step)
        except HeadwaterError as error:
            self.told["refusals"].append({"step": step, "error": str(error)})
            return
        self.stage = f"proof {step}"
        if self._newest is not None:
            self.told["pairs"].append(self._compared(self._newest, folder))
            self._saver.compared(self._newest)
        self._newest = folder
        if isinstance(self._saver, Managed):
            checkpoint = Checkpoint.open(folder)
            self.told["problems"] += verify(checkpoint)
            self.told["proven"].append(stored_digests(checkpoint) == live)

    def _compared(self, old: Path, new: Path) -> dict[str, Any]:
        verdict = check_freshness(old, new)
        of_optimizer = [chunk for chunk in verdict.stale if chunk.role in OPTIMIZER_ROLES]
        named = (of_optimizer or verdict.stale)[:NAMED]
        return {
            "step": self._savers.saves,
            "outcome": verdict.outcome,
            "stale": len(verdict.stale),
            "stale_optimizer": len(of_optimizer),
            "names": [f"{chunk.component}: {chunk.key}" for chunk in named],
        }

    def measure(self, what: str = "all") -> None:
        """What the device holds now, more than it held at the start. what: is away, as in the names of `begin`."""
        self.stage = f"measuring near save {self._step}"
        more = used_memory(self._models.device) - self._bases[what]
        self.told["used"].append({"step": self._step, "away": what, "bytes": more})
        self.stage = "the path"

    def finish(self) -> None:
        """What came out, and the end of all that it made; safe after an error."""
        told, saver = self.told, self._saver
        told["restarts"] = saver.restarts if saver is not None else None
        told["pid_stayed"] = len(set(told["pids"])) == 1
        told["fresh"] = bool(told["pairs"]) and all(pair["outcome"] == "fresh" for pair in told["pairs"])
        told["retained_total"] = max((one["bytes"] for one in told["used"]), default=None)
        if told["retained_total"] is not None:
            told["retained_bytes"] = told["retained_total"] - told["context_bytes"]
        self.stage = "closing"
        self._saver, self._pending = None, None
        try:
            for engine in self.engines.values():
                engine.fence.vacate()  # its memory is freed with it
            if saver is not None:
                self._savers.end_row(saver, told["error"] is not None)
        finally:
            self.engines, self._others = {}, []
            used_memory(self._models.device)


def nvrx_version() -> str | None:
    try:
        return importlib.metadata.version("nvidia-resiliency-ext")
    except importlib.metadata.PackageNotFoundError:
        return None


def read_all(engine: Any) -> dict[str, torch.Tensor]:
    """The weights as a generator would take them."""
    weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
    assert weights
    return weights


def ppo_turns(run: Run) -> None:
    """Policy and value model take turns on the device: scored, value trained, policy trained, both saved."""
    policy, value = run.begin("policy", "value")
    value.offload()
    for _ in run.steps():
        policy.logprobs(run.sequences)
        policy.offload()
        run.measure()
        value.onload()
        value.values(run.sequences)
        run.train("value")
        value.offload()
        policy.onload()
        run.train("policy")
        run.save()


def refit_before(run: Run) -> None:
    """The policy is on the host for a refit before each save."""
    (policy,) = run.begin("policy")
    for _ in run.steps():
        run.train("policy")
        policy.offload()
        run.measure()
        exported = read_all(policy)
        policy.onload()
        assert all(map(torch.equal, exported.values(), read_all(policy).values()))
        del exported
        run.save()


def refit_after(run: Run) -> None:
    """The same right after each save was begun, while it is still written."""
    (policy,) = run.begin("policy")
    for _ in run.steps():
        run.train("policy")
        run.save()
        policy.offload()
        run.measure()
        read_all(policy)
        policy.onload()


def optimizer_offload_for_logprob(run: Run) -> None:
    """Masters and moments are on the host while log-probabilities are computed."""
    (policy,) = run.begin("policy", partly=True)
    for _ in run.steps():
        policy.offload_optimizer()
        policy.logprobs(run.sequences)
        run.measure("optimizer")
        policy.onload()
        run.train("policy")
        run.save()


def distillation_student_offload(run: Run) -> None:
    """The student leaves the device to a teacher that scores. There is no such job yet: the path is the engine's."""
    student, teacher = run.begin("policy", others=1)
    for _ in run.steps():
        student.offload()
        run.measure()
        teacher.onload()
        teacher.logprobs(run.sequences)
        teacher.offload()
        student.onload()
        run.train("policy")
        run.save()


def offload_policy_before_refit_megatron_generation(run: Run) -> None:
    """Masters and moments leave, another model takes the weights and generates, then all comes back."""
    policy, generator = run.begin("policy", others=1, partly=True)
    for _ in run.steps():
        policy.logprobs(run.sequences)
        run.train("policy")
        run.save()
        policy.offload_optimizer()
        run.measure("optimizer")
        exported = read_all(policy)
        for chunk in generator.state_chunks():
            box = tuple(slice(b, b + n) for b, n in zip(chunk.offset, chunk.tensor.shape, strict=True))
            chunk.tensor.copy_(exported[chunk.name][box])
            assert digest(chunk.tensor) == digest(exported[chunk.name][box])
        del exported
        generator.logprobs(run.sequences)
        policy.onload()


def value_alone(run: Run) -> None:
    """A value model that is trained by itself, away after each save."""
    (value,) = run.begin("value")
    for _ in run.steps():
        run.train("value")
        run.save()
        value.offload()
        run.measure()
        value.onload()


def optimizer_state_appears(run: Run) -> None:
    """The value model trains alone at first: the policy's moments are new in the third save."""
    policy, value = run.begin("policy", "value", untrained=("policy",))
    for step in run.steps():
        run.train("value")
        assert bool(moments(policy)) == (step > 3)
        if step > 2:
            run.train("policy")
        run.save()
        policy.offload()
        value.offload()
        run.measure()
        policy.onload()
        value.onload()


def no_move(run: Run) -> None:
    """Nothing moves while it is trained and saved."""
    (policy,) = run.begin("policy")
    for _ in run.steps():
        run.train("policy")
        run.save()
    policy.offload()
    run.measure()


ROWS: dict[str, Callable[[Run], None]] = {
    row.__name__: row
    for row in (
        ppo_turns,
        refit_before,
        refit_after,
        optimizer_offload_for_logprob,
        distillation_student_offload,
        offload_policy_before_refit_megatron_generation,
        value_alone,
        optimizer_state_appears,
        no_move,
    )
}


def warm_up(models: Models) -> None:
    """What a process loads once, kernels and workspaces, is none of the rows'."""
    for name in ("policy", "value"):
        engine = models.engine(name)
        models.train(engine)
        engine.logprobs(models.sequences)
        read_all(engine)
        engine.offload_optimizer()
        engine.offload()
        engine.onload()
        del engine
        used_memory(models.device)


def table(rows: list[dict[str, Any]]) -> str:
    """Of rows as they were told: one line each."""
    heads = ["row", "saves", "fresh", "stale optimizer", "live=stored", "refused", "retained MiB", "context MiB"]
    lines = [[*heads, "median stall s", "pid stayed", "writer CUDA", "error"]]
    for row in rows:
        proven = row.get("proven") or []
        fresh = sum(pair["outcome"] == "fresh" for pair in row.get("pairs", []))
        values = [
            row["row"],
            row.get("saves"),
            f"{fresh}/{len(row.get('pairs', []))}",
            sum(pair["stale_optimizer"] for pair in row.get("pairs", [])),
            f"{sum(proven)}/{len(proven)}",
            len(row.get("refusals", [])),
            _mib(row.get("retained_bytes")),
            _mib(row.get("context_bytes")),
            f"{statistics.median(row.get('seconds') or [math.nan]):.3f}",
            row.get("pid_stayed"),
            (row.get("writer") or {}).get("context"),
            (row.get("error") or "")[:100],
        ]
        lines.append([str(value) for value in values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.1f}"


def as_line(told: dict[str, Any]) -> str:
    return f"ROW {json.dumps(told)}\n"
