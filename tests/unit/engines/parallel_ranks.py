"""One of four processes: trains small models at layouts of one, two and four ranks, and writes down what it saw.

`python parallel_ranks.py FOLDER RANK fast|slow`; the tests in test_parallel.py start four and read FOLDER/RANK.json and
FOLDER/<scenario>.safetensors. Ranks 0 and 1 are the job of two ranks, while rank 3 does what one process does.
On CUDA devices where DEVICE=cuda.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.ranks import Ranks
from headwater.checkpoint.reader import Checkpoint
from headwater.config.load import load_config
from headwater.config.schema import CheckpointingConfig
from headwater.data.types import Problem, Prompt, SamplingParams, TrainSequence
from headwater.engines.generate.native import NativeGenerator
from headwater.engines.torch.engine import TorchEngine
from headwater.engines.torch.sharding import gathered, local
from headwater.engines.torch.value import TorchValueEngine
from headwater.errors import UserError
from headwater.metrics.stat import reduce
from headwater.models.resolve import load_tokenizer, resolve
from headwater.workers.train import PolicyWorker
from headwater.workers.value import ValueWorker

STEPS = 5
VOCABULARY = 11
MICROBATCH = 3
SEQUENCES = 13  # with microbatches of 3, two data ranks have 3 and 2 of them, four have 2, 1, 1, 1

TP = "policy.torch_cfg.tensor_parallel_size=2"
SP = "policy.torch_cfg.sequence_parallel=true"
SLOWLY = "policy.optimizer.lr=2e-5"  # ten steps do not reach the loss's clip, where gradients end
BF16 = ("policy.precision=bfloat16", "policy.fp32_lm_head=true", SLOWLY)
VALUE_TP = "value.torch_cfg.tensor_parallel_size=2"
VALUE_SP = "value.torch_cfg.sequence_parallel=true"
VALUE_BF16 = ("value.precision=bfloat16",)
AC = "policy.torch_cfg.activation_checkpointing=true"

# Scenario -> (model, overrides), by the number of ranks.
Scenarios = dict[str, tuple[str, tuple[str, ...]]]
FAST: dict[int, Scenarios] = {
    1: {"inline": ("tiny", ()), "inline-bf16": ("tiny", BF16), "qwen3-inline": ("qwen3", ())},
    2: {
        "fsdp2": ("tiny", ()),
        "tp2": ("tiny", (TP,)),
        "tp2-sp": ("tiny", (TP, SP)),
        "fsdp2-bf16": ("tiny", BF16),
        "qwen3-tp2": ("qwen3", (TP,)),
    },
    4: {"fsdp2-tp2": ("tiny", (TP,)), "qwen3-fsdp4": ("qwen3", ())},
}
VALUE: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"value-inline": (), "value-inline-bf16": VALUE_BF16},
    2: {"value-fsdp2": (), "value-tp2-sp": (VALUE_TP, VALUE_SP), "value-fsdp2-bf16": VALUE_BF16},
    4: {"value-fsdp2-tp2": (VALUE_TP,)},
}
SLOW: dict[int, Scenarios] = {
    1: {
        "inline": ("tiny", ()),
        "inline-bf16": ("tiny", BF16),
        "qwen2-inline": ("qwen2", ()),
        "qwen3-inline": ("qwen3", ()),
    },
    2: {
        "fsdp2-recompute": ("tiny", (AC,)),
        "tp2-sp-recompute": ("tiny", (AC, TP, SP)),
        "tp2-sp-bf16": ("tiny", (*BF16, TP, SP)),
        "qwen2-tp2": ("qwen2", (TP,)),
        "qwen2-tp2-sp": ("qwen2", (TP, SP)),
        "qwen3-tp2-sp": ("qwen3", (TP, SP)),
    },
    4: {
        "fsdp2-tp2-sp": ("tiny", (TP, SP)),
        "fsdp2-tp2-sp-bf16": ("tiny", (*BF16, TP, SP)),
        "qwen3-fsdp2-tp2": ("qwen3", (TP,)),
        "qwen2-fsdp2-tp2-sp": ("qwen2", (TP, SP)),
    },
}


def make_model(kind: str, folder: Path) -> Path:
    """A random model of a few hundred parameters: six rows of a norm do not reach the last of four ranks."""
    path = folder / kind
    if kind == "tiny":
        return resolve("builtin:tiny")
    if not path.exists():
        config = AutoConfig.for_model(
            kind,
            vocab_size=VOCABULARY,
            hidden_size=6,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
        if kind == "qwen2":
            config.update({"hidden_size": 8})
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(path)
    return path


def rollout(vocabulary: int) -> list[TrainSequence]:
    """Groups of three completions of unequal lengths, with advantages that differ: always the same."""
    generator = torch.Generator().manual_seed(7)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    sequences = []
    while len(sequences) < SEQUENCES:
        prompt = integers(0, vocabulary, int(integers(5, 12)))
        for _ in range(min(3, SEQUENCES - len(sequences))):
            length = int(integers(1, 9))
            logprobs = -3 + torch.rand(length, generator=generator)
            sequences.append(
                TrainSequence(
                    group=len(sequences) // 3,
                    prompt_ids=prompt,
                    completion_ids=integers(0, vocabulary, length),
                    advantages=torch.randn((), generator=generator).expand(length),
                    generation_logprobs=logprobs,
                    sampling_logprobs=logprobs,
                )
            )
    return sequences


class Job:
    def __init__(self, folder: Path, world: int, rank: int) -> None:
        self.folder, self.world, self.rank = folder, world, rank
        self.device = torch.device("cuda", rank) if os.environ.get("DEVICE") == "cuda" else torch.device("cpu")

    def engine(self, kind: str, *overrides: str, trainable: bool = True) -> TorchEngine:
        common = f"policy.train_micro_batch_size={MICROBATCH}", "policy.logprob_batch_size=2"
        batch = "policy.train_global_batch_size=12", "grpo.num_generations_per_prompt=3"
        rate = "policy.optimizer.lr=1e-3" if kind != "tiny" else "policy.optimizer.lr=1e-4"
        config = load_config("grpo_tiny", [*common, *batch, rate, *overrides]).config
        return TorchEngine(config.policy, make_model(kind, self.folder), self.device, trainable=trainable)

    def worker(self, engine: TorchEngine) -> PolicyWorker:
        return PolicyWorker(engine, None, load_config("grpo_tiny").config.loss_fn, skip_without_signal=False)

    def train(self, engine: TorchEngine, sequences: Sequence[TrainSequence], steps: int = STEPS) -> dict[str, Any]:
        """Losses, gradient norms and metrics of optimizer steps on one rollout."""
        worker = self.worker(engine)
        losses, norms, stats = [], [], []
        for _ in range(steps):
            result = worker.forward_backward(sequences)
            losses.append(result.loss_sum)
            norms.append(engine.optim_step().grad_norm)
            stats.append(reduce(result.stats))
        return {"losses": losses, "norms": norms, "stats": stats}

    def rollout(self, engine: TorchEngine, kind: str) -> list[TrainSequence]:
        sequences = rollout(259 if kind == "tiny" else VOCABULARY)
        before = engine.logprobs(sequences)
        return [replace(s, prev_logprobs=logprobs) for s, logprobs in zip(sequences, before, strict=True)]

    def scenario(self, name: str, kind: str, overrides: tuple[str, ...]) -> dict[str, Any]:
        engine = self.engine(kind, *overrides)
        first = weights(engine)
        sequences = self.rollout(engine, kind)
        halves = [self.train(engine, sequences, 2)]
        move_storage(engine)
        answers = shared_generation(engine) if kind == "tiny" and SP not in overrides else None
        halves.append(self.train(engine, sequences, STEPS - 2))
        outcome: dict[str, Any] = {key: [*halves[0][key], *halves[1][key]] for key in halves[0]}
        outcome["answers"] = answers
        # A batch in which most ranks have nothing; then scored between gradient and step, as nothing else would see.
        worker = self.worker(engine)
        one = [replace(sequences[0], prev_logprobs=None)]
        outcome["loss of one"] = worker.forward_backward(one).loss_sum
        engine.logprobs(one)
        outcome["norm of one"] = engine.optim_step().grad_norm
        outcome["logprobs"] = torch.cat(engine.logprobs(sequences)).tolist()
        outcome["head copied"] = engine._fp32_head is not None and engine._fp32_head._copy is not None
        if kind == "tiny" and SP not in overrides:
            outcome["tokens"] = generated(engine)
        last = weights(engine)
        outcome["weights"] = digest(last)
        outcome["parameters"] = engine.num_trainable_parameters
        outcome["shapes"] = {name: list(local(tensor).shape) for name, tensor in engine.model.state_dict().items()}
        saved = list(engine.state_chunks())
        outcome["saved"] = [[c.name, list(c.global_shape), list(c.offset), list(c.tensor.shape)] for c in saved]
        outcome["bytes"] = [engine.checkpoint_bytes, sum(c.tensor.numel() * c.tensor.element_size() for c in saved)]
        if self.rank == 0:
            save_file({**{f"first.{key}": value for key, value in first.items()}, **last}, self.file(name))
        return outcome

    def value_scenario(self, name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
        """A value model's training on one rollout."""
        common = "value.train_micro_batch_size=4", "value.optimizer.lr=1e-4", "value.train_global_batch_size=16"
        config = load_config("ppo_tiny", [*common, *overrides]).config.value
        assert config is not None
        engine = TorchValueEngine(config, make_model("tiny", self.folder), self.device)
        worker = ValueWorker(engine, 0.2)
        first = weights(engine)
        returns = torch.Generator().manual_seed(3)
        sequences = [
            replace(s, values=before, returns=torch.randn(len(before), generator=returns))
            for s, before in zip(rollout(259), engine.values(rollout(259)), strict=True)
        ]
        losses, norms = [], []
        for _ in range(STEPS):
            losses.append(worker.forward_backward(sequences).loss_sum)
            norms.append(worker.optim_step().grad_norm)
        last = weights(engine)
        if self.rank == 0:
            save_file({**{f"first.{key}": value for key, value in first.items()}, **last}, self.file(name))
        return {
            "losses": losses,
            "norms": norms,
            "values": torch.cat(engine.values(sequences)).tolist(),
            "weights": digest(last),
            "saved": [
                [c.name, list(c.global_shape), list(c.offset), list(c.tensor.shape)] for c in engine.state_chunks()
            ],
        }

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def save(self, engine: TorchEngine, root: Path) -> None:
        config = CheckpointingConfig(checkpoint_dir=str(root))
        ranks = Ranks(self.rank, self.world, str(root)) if self.world > 1 else Ranks.alone()
        manager = CheckpointManager(config, "run", "tiny", ranks)
        try:
            manager.save(STEPS, {"policy": engine.state_chunks()}, {"step": STEPS}, "", None, 1, [engine.fence])
            manager.wait_committed(60.0)
        finally:
            manager.close()

    def save_and_go_on(self, name: str, *overrides: str) -> dict[str, Any]:
        engine = self.engine("tiny", SLOWLY, *overrides)
        sequences = self.rollout(engine, "tiny")
        self.train(engine, sequences)
        self.save(engine, self.folder / name)
        return self.train(engine, sequences)

    def load_and_go_on(self, source: str, name: str, *overrides: str) -> dict[str, Any]:
        """From what `source` saved, after a step that the checkpoint must undo."""
        engine = self.engine("tiny", SLOWLY, *overrides)
        sequences = self.rollout(engine, "tiny")
        self.train(engine, sequences, 1)
        (folder,) = (self.folder / source).glob("step_*")
        engine.load_chunks(Checkpoint.open_to_load(folder).component("policy"))
        self.save(engine, self.folder / name)
        return self.train(engine, sequences)

    def frozen(self, *overrides: str) -> list[float]:
        """Log-probs of an engine that only scores."""
        engine = self.engine("tiny", *overrides, trainable=False)
        assert engine.optimizer is None
        return torch.cat(engine.logprobs(rollout(259))).tolist()

    def refused(self, *overrides: str, kind: str = "tiny") -> str:
        try:
            self.engine(kind, *overrides)
        except UserError as error:
            return str(error)
        return "not refused"


def move_storage(engine: TorchEngine) -> None:
    """What a move to another device and back does, on a machine with one device."""
    assert engine.optimizer is not None
    before = [local(param) for param in engine.model.parameters()]  # kept, or their memory might be taken again
    engine.model._apply(lambda tensor: tensor.clone())
    engine.optimizer.move(engine.model.device)
    for old, param in zip(before, engine.model.parameters(), strict=True):
        assert old.numel() == 0 or old.data_ptr() != local(param).data_ptr()


def generated(engine: TorchEngine) -> list[list[int]]:
    """Tokens that the trained module samples for two prompts, two each."""
    generator = NativeGenerator(engine.model, load_tokenizer(resolve("builtin:tiny")), max_batch_size=64)
    problem = Problem(0, [{"role": "user", "content": ""}])
    asked = [Prompt(draw, problem, tuple(text)) for draw, text in enumerate((b"a", b"bcd"))]
    groups = generator.generate(asked, 2, SamplingParams(max_new_tokens=6, seed=3))
    return [list(completion.token_ids) for group in groups for completion in group]


def shared_generation(engine: TorchEngine) -> list[list[list[int]]]:
    """Tokens for one prompt, then for five of unequal lengths, shared out: some ranks have none, none waits."""
    generator = NativeGenerator(engine.model, load_tokenizer(resolve("builtin:tiny")), max_batch_size=2)
    problem = Problem(0, [{"role": "user", "content": ""}])
    asked = [Prompt(draw, problem, tuple(b"abcdefg"[: draw + 1])) for draw in range(5)]
    told = []
    for prompts in (asked[:1], asked):
        with gathered(engine.model):
            own = generator.generate(engine.layout.share(prompts), 1, SamplingParams(max_new_tokens=6, seed=3))
        groups = [group for of_rank in engine.layout.gather(own) for group in of_rank]
        told.append([list(completion.token_ids) for group in groups for completion in group])
    return told


def weights(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.export_weights()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def checkpoints(job: Job, which: str) -> dict[str, Callable[[], Any]]:
    """What each world saves and loads, in that order: two ranks, four, one."""
    if which == "fast":
        of_world: dict[int, dict[str, Callable[[], Any]]] = {
            2: {
                "save": lambda: job.save_and_go_on("saved"),
                "load-tp2": lambda: job.load_and_go_on("saved", "again-tp2", TP),
                "frozen-fsdp2": job.frozen,
                "frozen-tp2": lambda: job.frozen(TP),
                "odd size": lambda: job.refused("policy.torch_cfg.tensor_parallel_size=3"),
            },
            4: {
                "load-fsdp2-tp2": lambda: job.load_and_go_on("saved", "again-fsdp2-tp2", TP, SP),
                "odd heads": lambda: job.refused("policy.torch_cfg.tensor_parallel_size=4"),
            },
            1: {"load-inline": lambda: job.load_and_go_on("saved", "again-inline"), "frozen-inline": job.frozen},
        }
    else:
        of_world = {
            2: {
                "save": lambda: job.save_and_go_on("saved", *BF16),
                "load-tp2": lambda: job.load_and_go_on("saved", "again-tp2", *BF16, TP, SP),
            },
            4: {"load-fsdp4": lambda: job.load_and_go_on("saved", "again-fsdp4", *BF16)},
            1: {"load-inline": lambda: job.load_and_go_on("saved", "again-inline", *BF16)},
        }
    return of_world[job.world]


def join(folder: Path, world: int, rank: int, device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    rendezvous, timeout = f"file://{folder}/rendezvous-{world}", timedelta(seconds=240)
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, timeout=timeout)


def main(folder: Path, rank: int, which: str) -> None:
    scenarios = FAST if which == "fast" else SLOW
    outcome: dict[str, Any] = {}

    def run(job: Job, *, trains: bool = True, checkpointed: bool = True) -> None:
        for name, (kind, overrides) in scenarios[job.world].items() if trains else ():
            outcome[name] = job.scenario(name, kind, overrides)
        for name, overrides in VALUE[job.world].items() if trains and which == "fast" else ():
            outcome[name] = job.value_scenario(name, overrides)
        for name, step in checkpoints(job, which).items() if checkpointed else ():
            outcome[name] = step()

    if rank == 3:
        run(Job(folder, 1, 0), checkpointed=False)
    for world in (2, 4):
        if rank < world:
            job = Job(folder, world, rank)
            if job.device.type == "cuda":
                torch.cuda.set_device(job.device)
            join(folder, world, rank, job.device)
            run(job)
            dist.barrier()
            dist.destroy_process_group()
    if rank == 3:
        run(Job(folder, 1, 0), trains=False)
    (folder / f"{rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
