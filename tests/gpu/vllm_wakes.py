"""Whether vLLM wakes after each save: a Megatron trainer and the real vLLM share one device, in six rounds an arm.

python tests/gpu/vllm_wakes.py [--rounds 6] [--margin-gb 1.5] [--kv-gb 12] [--limit-s 420] [--folder FOLDER]

A round: onload, train a step, save, offload, wake vLLM, generate, let vLLM sleep. Once the trainer is offloaded vLLM's
wake needs the memory that the trainer's state had: a ballast leaves `--margin-gb` beside them. Arms: `native` and
`nvrx` with Headwater's lifecycle; `control` is NVRx as stacks use it, which nobody asks to let go before the offload.

Prints `RESULT {json}` at the end, which is also $OUT/vllm_wakes.json. Exit code: 0 if all was as expected, 1 if not,
3 where the time ran out. `--no-vllm` is a dry run of all else, without a device too.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch  # heavier imports wait: each process that is spawned runs this file's head too

SETTINGS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has a context of its own, which a fork would break
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
for _key, _value in SETTINGS.items():
    os.environ.setdefault(_key, _value)

GB = 1e9
VOCABULARY = 49_152
PROMPTS, NEW_TOKENS = 8, 16
PROMPT, COMPLETION = 32, 64
COMMIT_S, WAKE_S, CONTEXT_S = 120.0, 60.0, 90.0
ON_DEVICE = __name__ == "__main__" and torch.cuda.is_available()
TRAINER = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
TRAINER_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
GENERATOR = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
OVERRIDES = (
    "policy.precision=bfloat16",
    "policy.optimizer.lr=1e-4",
    "policy.train_micro_batch_size=8",
    "policy.train_global_batch_size=8",
    "policy.logprob_batch_size=8",
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=4",
    "loss_fn.reference_policy_kl_penalty=0.0",
)
STARTED = time.perf_counter()
_Value = TypeVar("_Value")


def free_bytes() -> int:
    """Of the whole device, whoever uses it."""
    return torch.cuda.mem_get_info()[0] if ON_DEVICE else 0


def say(text: str) -> None:
    free = f"{free_bytes() / GB:7.2f} GB free" if ON_DEVICE else "no device"
    sys.stdout.write(f"[{time.perf_counter() - STARTED:6.1f} s, {free}] {text}\n")
    sys.stdout.flush()


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]


def limited(what: str, seconds: float, work: Callable[[], _Value], lost: Callable[[], bool] = lambda: False) -> _Value:
    """Do it in a thread that may hang. Raises what it raises; TimeoutError when it is late or `lost` while it waits."""
    done, results, errors = threading.Event(), list[_Value](), list[BaseException]()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=run, name=what, daemon=True).start()
    deadline = time.monotonic() + seconds
    while not done.wait(0.2):
        if lost() and not done.wait(5):
            raise TimeoutError(f"{what}: the process that should answer is gone")
        if time.monotonic() > deadline:
            faulthandler.dump_traceback(all_threads=True)
            raise TimeoutError(f"{what}: no answer after {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


class Report:
    """What is known so far, told once, whatever ends the program."""

    def __init__(self, limit_s: float) -> None:
        self.found: dict[str, Any] = {"passed": False, "problems": [], "arms": {}}
        self._lock = threading.Lock()
        self._told = False
        faulthandler.enable()
        faulthandler.dump_traceback_later(limit_s + 20, exit=True)  # where the watchdog itself cannot run
        threading.Thread(target=self._watch, args=(limit_s,), name="watchdog", daemon=True).start()

    def _watch(self, limit_s: float) -> None:
        time.sleep(max(0.0, limit_s - (time.perf_counter() - STARTED)))
        sys.stdout.write(f"watchdog: {limit_s:g} s are over; where every thread is:\n")
        sys.stdout.flush()
        faulthandler.dump_traceback(all_threads=True)
        self.found["problems"].append(f"not done after {limit_s:g} s")
        self.end(3)

    def problem(self, text: str) -> None:
        self.found["problems"].append(text)
        say(f"PROBLEM {text}")

    def end(self, code: int) -> None:
        """Print it, end what was started, and leave: no destructor of a device may hang or crash then."""
        with self._lock:
            if self._told:
                return
            self._told = True
            self.found["elapsed_s"] = round(time.perf_counter() - STARTED, 1)
            text = json.dumps(self.found, default=str)
            with suppress(OSError):
                if "OUT" in os.environ:
                    (Path(os.environ["OUT"]) / "vllm_wakes.json").write_text(text)
            sys.stdout.write(f"{table(self.found['arms'])}\nRESULT {text}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            for process in multiprocessing.active_children():
                process.kill()
            os._exit(code)


COLUMNS = {
    "round": ("round", "{}"),
    "stall_s": ("stall s", "{:.3f}"),
    "offload_s": ("offload s", "{:.3f}"),
    "free_before_wake": ("free GB", "{:.2f}"),
    "retained": ("retained GB", "{:.2f}"),
    "wake_s": ("wake s", "{:.3f}"),
    "tokens": ("tokens", "{}"),
    "moments_moved": ("moments", "{}"),
    "fresh": ("fresh", "{}"),
    "error": ("", "{}"),
}
IN_GB = ("free_before_wake", "retained")


def table(arms: dict[str, Any]) -> str:
    lines = [["arm", *(head for head, _ in COLUMNS.values())]]
    for name, arm in list(arms.items()):
        for entry in list(arm["rounds"]):
            cells = [name]
            for key, (_, form) in COLUMNS.items():
                value = entry.get(key)
                cells.append("" if value is None else form.format(value / GB if key in IN_GB else value))
            lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    return "\n".join("  ".join([*map(str.rjust, line, widths), line[-1]]).rstrip() for line in lines)


class Vllm:
    """The real one, its engine in a process of its own."""

    def __init__(self, folder: Path, kv_bytes: int) -> None:
        from vllm import LLM, SamplingParams

        self._llm: Any = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            max_num_batched_tokens=2048,
            max_num_seqs=16,
            enforce_eager=True,
            enable_sleep_mode=True,
            enable_flashinfer_autotune=False,
            gpu_memory_utilization=0.3,  # must be free at the start; the size of the cache is the next line's
            kv_cache_memory_bytes=kv_bytes,
        )
        self._sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
        self._prompts: Any = [{"prompt_token_ids": [7 + 13 * i + j for j in range(PROMPT)]} for i in range(PROMPTS)]
        self.usable = True

    def _call(self, what: str, work: Callable[[], Any], seconds: float = WAKE_S) -> Any:
        resources = getattr(self._llm.llm_engine.engine_core, "resources", None)
        return limited(f"vLLM {what}", seconds, work, lambda: bool(getattr(resources, "engine_dead", False)))

    def wake(self) -> None:
        self._call("wake", self._llm.wake_up)

    def generate(self) -> int:
        """Returns how many tokens came; raises where one is missing."""
        outputs = self._call(
            "generate", lambda: self._llm.generate(self._prompts, self._sampling, use_tqdm=False), seconds=90
        )
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        assert counts == [NEW_TOKENS] * PROMPTS, f"vLLM generated {counts} tokens"
        return sum(counts)

    def sleep(self) -> None:
        self._call("sleep", lambda: self._llm.sleep(level=1))

    def answers(self) -> bool:
        """Whether its engine is there still, be it awake or asleep."""
        try:
            self._call("question", self._llm.llm_engine.is_sleeping, seconds=15)
        except Exception as error:
            say(f"vLLM's engine does not answer: {first_line(error)}")
            return False
        return True

    def close(self) -> None:
        limited("vLLM's end", 20, lambda: self._llm.llm_engine.engine_core.shutdown(timeout=10))


class NoVllm:
    """Stands in for it in a dry run: holds device memory while it is awake, where there is a device."""

    usable = True

    def __init__(self, kv_bytes: int) -> None:
        self._bytes = kv_bytes
        self._cache: Any = None
        self.wake()

    def wake(self) -> None:
        self._cache = torch.empty(self._bytes, dtype=torch.uint8, device="cuda") if ON_DEVICE else 0

    def generate(self) -> int:
        return PROMPTS * NEW_TOKENS

    def sleep(self) -> None:
        self._cache = None
        if ON_DEVICE:
            torch.cuda.empty_cache()

    def answers(self) -> bool:
        return True

    def close(self) -> None:
        self._cache = None


class Trainer:
    """A Megatron policy that really trains. step: of how many steps it took."""

    def __init__(self, folder: Path) -> None:
        from headwater.config.load import load_config
        from headwater.engines.megatron.engine import MegatronEngine
        from headwater.workers.train import PolicyWorker

        config = load_config("grpo_megatron", OVERRIDES).config
        device = torch.device("cuda", 0) if ON_DEVICE else torch.device("cpu")
        self.engine = MegatronEngine(config.policy, folder, device, moves_on_host=True)
        self._worker = PolicyWorker(self.engine, None, config.loss_fn, skip_without_signal=False)
        self._moments: list[int] = []
        self.steps = 0

    def step(self) -> tuple[int, int, float]:
        """Returns how many of the moments changed, how many there are, and the norm of the gradient."""
        from headwater.checkpoint.digest import digest_all

        batch = self._batch()
        scored = self.engine.logprobs(batch)
        batch = [replace(s, generation_logprobs=p, sampling_logprobs=p) for s, p in zip(batch, scored, strict=True)]
        self._worker.forward_backward(batch)
        norm = self._worker.optim_step().grad_norm
        self.steps += 1
        before = self._moments
        self._moments = digest_all([c.tensor for c in self.engine.state_chunks() if "exp_avg" in c.name])
        moved = sum(a != b for a, b in zip(before, self._moments, strict=True)) if before else len(self._moments)
        assert norm > 0, "a step without a gradient"
        return moved, len(self._moments), norm

    def _batch(self) -> list[Any]:
        from headwater.data.types import TrainSequence

        generator = torch.Generator().manual_seed(self.steps)

        def ids(count: int) -> torch.Tensor:
            return torch.randint(0, VOCABULARY, (count,), generator=generator)

        prompts = [ids(PROMPT) for _ in range(2)]
        return [
            TrainSequence(
                group=index // 4,
                prompt_ids=prompts[index // 4],
                completion_ids=ids(COMPLETION),
                advantages=torch.randn((), generator=generator).repeat(COMPLETION),
                generation_logprobs=torch.zeros(COMPLETION),
                sampling_logprobs=torch.zeros(COMPLETION),
            )
            for index in range(8)
        ]

    def offload(self) -> None:
        self.engine.offload()
        gc.collect()
        if ON_DEVICE:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class Lifecycle:
    """Headwater's checkpoints with one strategy."""

    def __init__(self, trainer: Trainer, root: Path, strategy: Any) -> None:
        from headwater.checkpoint.manager import CheckpointManager
        from headwater.config.schema import CheckpointingConfig

        self.root = root
        self._trainer = trainer
        config = CheckpointingConfig(checkpoint_dir=str(root), keep_latest_k=2, strategy=strategy)
        self._manager = CheckpointManager(config, "run", "model")
        self._manager.prepare({"policy": trainer.engine.checkpoint_bytes}, ON_DEVICE, None)
        self._folder: Path | None = None
        self._pid: int | None = None

    def save(self, step: int) -> None:
        engine = self._trainer.engine
        chunks = {"policy": list(engine.state_chunks())}
        self._manager.save(step, chunks, {}, "", None, step, [engine.fence], may_skip=False)

    def prove(self, entry: dict[str, Any]) -> None:
        """Wait for the commit; whether it is fresher than the one before, and the writer is the same and alive."""
        from headwater.checkpoint.catalog import newest
        from headwater.checkpoint.compare import check_freshness

        started = time.perf_counter()
        self._manager.wait_committed(COMMIT_S)
        news = self._manager.take_news()
        entry["commit_wait_s"] = time.perf_counter() - started
        entry["restarts"] = news.metrics["checkpoint/writer_restarts"]
        pid = self._manager.writer_pid
        entry["writer_pid"], entry["writer_alive"] = pid, alive(pid)
        entry["writer_kept"] = self._pid in (None, pid)
        before, self._pid = self._folder, pid
        found = newest(self.root)
        assert found is not None, "no save was committed"
        self._folder = found.folder
        if before is not None:
            started = time.perf_counter()
            verdict = check_freshness(before, found.folder)
            entry["fresh"] = verdict.outcome
            entry["fresh_s"] = time.perf_counter() - started
            if verdict.reasons:
                entry["reasons"] = list(verdict.reasons)[:5]
            self._manager.wait_pruned()

    def close(self) -> None:
        limited(f"the end of {self.root.name}", COMMIT_S, self._manager.close)
        shutil.rmtree(self.root, ignore_errors=True)


class Control:
    """NVRx without a lifecycle. Its process has a device context before its first save, as the others' have."""

    def __init__(self, trainer: Trainer, root: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from plain_nvrx import PlainNvrx

        root.mkdir(parents=True)
        filesystem_async._results_queue = None  # Headwater's strategy leaves a stand-in there
        filesystem_async.FileSystemWriterAsync.cleanup_tensor_caches()
        self._trainer = trainer
        if ON_DEVICE:
            before, deadline = free_bytes(), time.monotonic() + CONTEXT_S
            AsyncCallsQueue.warmup_persistent_caller(0)
            while before - free_bytes() < 0.2 * GB and time.monotonic() < deadline:
                time.sleep(0.5)
            time.sleep(3)
            say(f"the control's writer has its context: {(before - free_bytes()) / GB:.2f} GB")
        self._nvrx = PlainNvrx(root)

    def save(self, step: int) -> None:
        self._nvrx.save(step, {"policy": self._trainer.engine.state_chunks()})

    def prove(self, entry: dict[str, Any]) -> None:
        limited("the control's write", COMMIT_S, self._nvrx.finalize)
        entry["writer_pid"], entry["writer_alive"] = self._nvrx.pid, alive(self._nvrx.pid)

    def close(self) -> None:
        limited("the end of the control's writer", 60, self._nvrx.close)
        gc.collect()
        if ON_DEVICE:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


def alive(pid: int | None) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Stage:
    """What all arms share. idle: bytes free while the trainer is offloaded and vLLM sleeps. taken: by vLLM's wake.

    vLLM is usable until a round ends with it awake, or half awake.
    """

    report: Report
    vllm: Vllm | NoVllm
    trainer: Trainer
    idle: int = 0
    taken: int = 0
    ballast: list[torch.Tensor] = field(default_factory=list)

    def asleep(self) -> int:
        """Bytes free with the trainer offloaded, as it is between rounds."""
        self.trainer.offload()
        return free_bytes()

    def wake_and_generate(self, entry: dict[str, Any]) -> None:
        """Raises what vLLM raises; the entry has then what came before."""
        usable, self.vllm.usable = self.vllm.usable, False
        started = time.perf_counter()
        try:
            self.vllm.wake()
        except Exception as error:
            entry["error"] = entry["wake_error"] = first_line(error)
            raise
        entry["wake_s"] = time.perf_counter() - started
        entry["free_awake"] = free_bytes()
        entry["tokens"] = self.vllm.generate()
        self.vllm.sleep()
        self.vllm.usable = usable

    def round(self, arm: str, number: int, saver: Lifecycle | Control) -> dict[str, Any]:
        """One round; what it raises is in its entry too."""
        entry: dict[str, Any] = {"round": number}
        self.report.found["arms"][arm]["rounds"].append(entry)
        try:
            self.trainer.engine.onload()
            entry["moments_moved"], entry["moments"], entry["grad_norm"] = self.trainer.step()
            if ON_DEVICE:
                torch.cuda.synchronize()
            started = time.perf_counter()
            saver.save(number)
            entry["stall_s"] = time.perf_counter() - started
            started = time.perf_counter()
            self.trainer.offload()
            entry["offload_s"] = time.perf_counter() - started
            entry["free_before_wake"] = free_bytes()
            entry["retained"] = self.idle - entry["free_before_wake"]
            if ON_DEVICE:
                held = sum(tensor.nbytes for tensor in self.ballast)
                entry["reserved_by_trainer"] = torch.cuda.memory_reserved() - held
            self.wake_and_generate(entry)
            saver.prove(entry)
        except Exception as error:
            entry.setdefault("error", first_line(error))
            if "wake_error" not in entry:
                traceback.print_exc()
            raise
        finally:
            say(f"{arm} round {number}: {json.dumps({k: rounded(v) for k, v in entry.items()})}")
        return entry


def rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def run_arm(
    stage: Stage, name: str, rounds: int, make: Callable[[], Lifecycle | Control]
) -> Lifecycle | Control | None:
    """Rounds until one fails. Returns what saved, which is still open; None where it could not be made."""
    arm = stage.report.found["arms"].setdefault(name, {"rounds": []})
    arm["error"] = None
    if not stage.vllm.usable:
        arm["error"] = "not run: vLLM did not survive an arm before it"
        return None
    saver = None
    try:
        saver = make()
        stage.idle = stage.asleep()
        arm["idle_free"] = stage.idle
        say(f"arm {name}: with vLLM asleep and the trainer offloaded; vLLM's wake takes {stage.taken / GB:.2f} GB")
        if isinstance(saver, Control):
            arm["context_alone"] = {}
            stage.wake_and_generate(arm["context_alone"])
            say(f"vLLM wakes beside the control's context: {arm['context_alone']}")
        for number in range(1, rounds + 1):
            stage.round(name, number, saver)
    except Exception as error:
        arm["error"] = first_line(error)
        if not arm["rounds"]:
            traceback.print_exc()
        say(f"arm {name} ends: {arm['error']}")
    return saver


def aftermath(stage: Stage, control: Control) -> None:
    """What is known of vLLM after the failure, and whether the memory comes back with the writer's end."""
    arm = stage.report.found["arms"]["control"]
    after = arm["after"] = {"free_after_wake": free_bytes(), "vllm_answers": stage.vllm.answers()}
    try:
        control.close()
        after["given_back_by_close"] = free_bytes() - after["free_after_wake"]
        stage.vllm.wake()
        after["second_wake"] = "woke"
    except Exception as error:
        after["second_wake"] = first_line(error)
    say(f"after the control's failure: {after}")


def judge(found: dict[str, Any], rounds: int, *, expects_failure: bool) -> list[str]:
    """What is not as it should be. expects_failure: of the control, on a device whose memory counts."""
    problems = []
    for name in ("native", "nvrx"):
        arm = found["arms"].get(name, {"rounds": [], "error": "not run"})
        if arm["error"]:
            problems.append(f"{name}: {arm['error']}")
        good = [
            entry
            for entry in arm["rounds"]
            if entry.get("tokens") == PROMPTS * NEW_TOKENS
            and entry.get("fresh") == "fresh"
            and entry["moments_moved"] == entry["moments"]
            and entry["writer_alive"]
            and entry["writer_kept"]
            and entry["restarts"] == 0
        ]
        if len(good) != rounds:
            problems.append(f"{name}: {len(good)} of {rounds} rounds were good")
    control = found["arms"].get("control", {"rounds": [], "error": "not run"})
    last = control["rounds"][-1] if control["rounds"] else {}
    if expects_failure:
        if control.get("context_alone", {}).get("tokens") is None:
            problems.append("control: vLLM did not wake beside its context alone")
        elif "wake_error" not in last:
            problems.append(f"control: expected a wake to fail, found: {control['error'] or 'no failure'}")
        elif last["retained"] < 0.5 * found["state_bytes"]:
            problems.append(f"control: the wake failed although only {last['retained']:,} bytes were retained")
    return problems


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    for name in ("vllm", "transformers", "megatron-core", "nvidia-resiliency-ext"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def make_model(folder: Path, shape: dict[str, int], kv_heads: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **shape,  # pyright: ignore[reportArgumentType]
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    model.save_pretrained(folder)
    say(f"{folder.name}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")
    return folder


def experiment(args: argparse.Namespace, report: Report, folder: Path) -> None:
    found = report.found
    kv_bytes = int(args.kv_gb * GB)
    say(f"starts: {found['versions']}, files in {folder}")
    assert shutil.disk_usage(folder).free > (25 * GB if not args.tiny else GB), "too little room for checkpoints"
    for_trainer = make_model(folder / "trainer", TRAINER_TINY if args.tiny else TRAINER, 4 if args.tiny else 16)
    vllm = NoVllm(kv_bytes) if args.no_vllm else Vllm(make_model(folder / "generator", GENERATOR, 3), kv_bytes)
    say("vLLM is up")
    found["vllm_start_s"] = round(time.perf_counter() - STARTED, 1)
    say(f"vLLM generated {vllm.generate()} tokens")
    vllm.sleep()
    say("vLLM sleeps")
    vllm.wake()
    say(f"vLLM woke, generated {vllm.generate()} tokens")
    vllm.sleep()
    say("vLLM sleeps again")

    trainer = Trainer(for_trainer)
    stage = Stage(report, vllm, trainer)
    say("the trainer is up")
    _, moments, norm = trainer.step()
    found["state_bytes"] = trainer.engine.checkpoint_bytes
    say(f"a step: norm {norm:.4f}, {moments} moments, a checkpoint has {found['state_bytes'] / GB:.2f} GB")
    assert args.tiny or found["state_bytes"] > (args.margin_gb + 1) * GB, "the margin is not below the state"
    savers = {name: Lifecycle(trainer, folder / name, name) for name in ("native", "nvrx")}
    for name, saver in savers.items():  # each has its process, its kernels and its first save before the ballast
        entry: dict[str, Any] = {}
        saver.save(0)
        saver.prove(entry)
        say(f"{name}: the save before the rounds is committed, {entry}")
    trainer.step()
    if ON_DEVICE:
        found["trainer_peak"] = torch.cuda.max_memory_allocated()
        say(f"a second step; the trainer's peak is {found['trainer_peak'] / GB:.2f} GB")

    stage.asleep()
    say("the trainer is offloaded")
    asleep = free_bytes()
    vllm.wake()
    vllm.generate()
    found["free_before_ballast"] = awake = free_bytes()
    found["taken_by_wake"] = stage.taken = asleep - awake
    say(f"vLLM is awake beside the offloaded trainer; its wake takes {stage.taken / GB:.2f} GB")
    if ON_DEVICE:
        stage.ballast.append(
            torch.empty(awake - int(args.margin_gb * GB), dtype=torch.uint8, device=torch.device("cuda", 0))
        )
        found["ballast_bytes"] = stage.ballast[0].nbytes
        found["free_with_ballast"] = free_bytes()
        say("the ballast is there")
    vllm.sleep()
    say("vLLM sleeps")
    if ON_DEVICE and found["trainer_peak"] > free_bytes():
        report.problem("a step of the trainer may not fit beside the ballast: raise --kv-gb")

    for name, saver in savers.items():
        run_arm(stage, name, args.rounds, lambda saver=saver: saver)
        try:
            saver.close()
        except Exception as error:
            report.problem(f"{name} does not end: {first_line(error)}")
        say(f"{name} is closed")
    control = run_arm(stage, "control", args.rounds, lambda: Control(trainer, folder / "control"))
    if isinstance(control, Control):
        if not vllm.usable:
            aftermath(stage, control)
        else:
            control.close()
    found["problems"] += judge(found, args.rounds, expects_failure=ON_DEVICE and not args.tiny)
    found["passed"] = not found["problems"]
    with suppress(Exception):
        vllm.close()
    say("vLLM is closed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--margin-gb", type=float, default=1.0)
    parser.add_argument("--kv-gb", type=float, default=8.0, help="vLLM's cache: a step of the trainer must fit in it")
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--folder", type=Path, default=None, help="for models and checkpoints, 25 GB")
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    report = Report(args.limit_s)
    report.found |= {"versions": versions(), "arguments": {key: str(value) for key, value in vars(args).items()}}
    code, folder = 1, Path(tempfile.mkdtemp(prefix="vllm_wakes-", dir=args.folder))
    try:
        allocator = [os.environ.get(key, "") for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
        assert not any("expandable_segments:True" in value for value in allocator), "expandable segments must be off"
        if ON_DEVICE:
            report.found["device"] = torch.cuda.get_device_name()
        else:
            assert args.no_vllm, "torch sees no CUDA device"
            from headwater.engines.megatron import cpu

            cpu.enable()
        experiment(args, report, folder)
        code = 0 if report.found["passed"] else 1
    except BaseException as error:
        traceback.print_exc()
        report.found["problems"].append(first_line(error))
    shutil.rmtree(folder, ignore_errors=True)
    report.end(code)


if __name__ == "__main__":
    main()
