"""One of four processes: trains small models with megatron-core at many layouts, and writes down what it saw.

`python engine_ranks.py FOLDER RANK`; test_engine.py starts four and reads FOLDER/RANK.json. All four are one job first;
then ranks 0 and 1 are a job of two, while rank 3 does what one process does, with the torch backend too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "engines")]

import torch
import torch.distributed as dist
from families import FAMILIES, MOE, make_model
from parallel_ranks import rollout
from safetensors.torch import load_file

from headwater.checkpoint.digest import digest
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.ranks import Ranks
from headwater.checkpoint.reader import Checkpoint
from headwater.config.load import load_config
from headwater.config.schema import CheckpointingConfig
from headwater.data.types import TrainSequence
from headwater.engines.base import TrainEngine
from headwater.engines.megatron import cpu
from headwater.errors import UserError
from headwater.models.resolve import resolve
from headwater.workers.train import PolicyWorker
from headwater.workers.value import ValueWorker

STEPS = 5
TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
PLAIN = {"use_distributed_optimizer": False}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {"dp2": {}, "dp2-plain": PLAIN, "tp2": TP, "tp2-sp": SP, "pp2": PP, "cp2": CP, "ep2": EP},
    4: {
        "tp2-pp2": {**TP, **PP},
        "tp2-sp-pp2": {**SP, **PP},
        "tp2-sp-cp2": {**SP, **CP},
        "ep2-pp2": {**EP, **PP},
        "ep2-tp2-sp-pp2": {**EP, **SP, **PP, "expert_tensor_parallel_size": 1},
    },
}


FOR_ALL = ("one", "tp2", "tp2-sp", "pp2", "ep2", "tp2-pp2", "tp2-sp-pp2")
"""Layouts that every family trains at; the others show how ranks work together, with a model of each kind."""


def fits(model: str, layout: str) -> bool:
    """Experts are what EP cuts, and under tensor parallelism they want sequence parallelism."""
    if model not in ("llama-tied", "mixtral") and layout not in FOR_ALL:
        return False
    if model in MOE:
        return "tp2" not in layout or "sp" in layout
    return "ep2" not in layout and layout != "tp2-sp-pp2"


SLOWLY = "optimizer.lr=2e-5"  # ten steps do not reach the loss's clip, where gradients end


class Job:
    """Ranks that train together. torch_backend: by the torch backend, alone."""

    def __init__(self, folder: Path, world: int, rank: int, *, torch_backend: bool = False) -> None:
        self.folder, self.world, self.rank = folder, world, rank
        self._torch = torch_backend
        self._layout: dict[str, Any] | None = None

    def engine(
        self, model: str, layout: dict[str, Any], *overrides: str, group: str = "policy", moves_on_host: bool = False
    ) -> Any:
        from headwater.engines.megatron import engine as megatron
        from headwater.engines.megatron import model as megatron_model
        from headwater.engines.torch.engine import TorchEngine
        from headwater.engines.torch.value import TorchValueEngine

        keys = [] if self._torch else ["enabled=true", *(f"{key}={value}" for key, value in layout.items())]
        words = ["train_micro_batch_size=3", "logprob_batch_size=2", "train_global_batch_size=12"]
        words += ["optimizer.lr=1e-3", *(f"megatron_cfg.{key}" for key in keys), *overrides]
        recipe, completions = (
            ("grpo_tiny", "grpo.num_generations_per_prompt=3")
            if group == "policy"
            else ("ppo_tiny", "ppo.num_prompts_per_step=12")
        )
        other = () if group == "policy" else ("policy.train_global_batch_size=12", "policy.train_micro_batch_size=3")
        config = load_config(recipe, [completions, *other, *(f"{group}.{word}" for word in words)]).config
        chosen = config.policy if group == "policy" else config.value
        path = resolve("builtin:tiny") if model == "tiny" else make_model(model, self.folder)
        kinds = {
            "policy": (TorchEngine, megatron.MegatronEngine),
            "value": (TorchValueEngine, megatron.MegatronValueEngine),
        }
        assert chosen is not None
        if self._layout != layout:  # groups of ranks are made once for all models of a layout
            megatron_model.forget_parallel_sizes()
            self._layout = layout
        return kinds[group][not self._torch](chosen, path, torch.device("cpu"), moves_on_host=moves_on_host)

    def train(self, engine: TrainEngine, sequences: Sequence[TrainSequence], steps: int = STEPS) -> dict[str, Any]:
        worker = PolicyWorker(engine, None, load_config("grpo_tiny").config.loss_fn, skip_without_signal=False)
        losses, norms = [], []
        for _ in range(steps):
            losses.append(worker.forward_backward(sequences).loss_sum)
            norms.append(worker.optim_step().grad_norm)
        return {"losses": losses, "norms": norms}

    def rollout(self, engine: TrainEngine, model: str) -> list[TrainSequence]:
        sequences = rollout(259 if model == "tiny" else 11)
        before = engine.logprobs(sequences)
        return [replace(s, prev_logprobs=logprobs) for s, logprobs in zip(sequences, before, strict=True)]

    def scenario(self, model: str, layout: dict[str, Any], *overrides: str) -> dict[str, Any]:
        engine = self.engine(model, layout, *overrides)
        exact = None
        if not self._torch and model != "tiny":
            stored = load_file(self.folder / model / "model.safetensors")
            exported = dict(engine.export_weights())
            exact = exported.keys() == stored.keys() and all(
                torch.equal(exported[name], stored[name]) for name in stored
            )
        sequences = self.rollout(engine, model)
        first = torch.cat([s.prev_logprobs for s in sequences if s.prev_logprobs is not None])
        outcome = self.train(engine, sequences)
        # A batch of one, which other data-parallel ranks have nothing of; then scored between gradient and step.
        outcome |= {f"{key} of one": value for key, value in self.train(engine, sequences[:1], 1).items()}
        outcome["first"], outcome["last"] = first.tolist(), torch.cat(engine.logprobs(sequences)).tolist()
        recomputes = not self._torch and engine.model.config.recompute_granularity == "full"
        return outcome | {"exact": exact, "parameters": engine.num_trainable_parameters, "recomputes": recomputes}

    def value_scenario(self, layout: dict[str, Any], *overrides: str) -> dict[str, Any]:
        engine = self.engine("tiny", layout, "optimizer.lr=1e-4", *overrides, group="value")
        worker = ValueWorker(engine, 0.2)
        generator = torch.Generator().manual_seed(3)
        sequences = [
            replace(s, values=values, returns=torch.randn(len(values), generator=generator))
            for s, values in zip(rollout(259), engine.values(rollout(259)), strict=True)
        ]
        losses, norms = [], []
        for _ in range(STEPS):
            losses.append(worker.forward_backward(sequences).loss_sum)
            norms.append(worker.optim_step().grad_norm)
        return {"losses": losses, "norms": norms, "last": torch.cat(engine.values(sequences)).tolist()}

    def masters(self, layout: dict[str, Any]) -> dict[str, Any]:
        """Of a bf16 value model, whose head is fp32: how many boxes of master weights are not what its weights are."""
        engine = self.engine("tiny", layout, "optimizer.lr=1e-4", "precision=bfloat16", group="value")
        worker = ValueWorker(engine, 0.2)
        sequences = [
            replace(s, values=values, returns=torch.ones(len(values)))
            for s, values in zip(rollout(259), engine.values(rollout(259)), strict=True)
        ]
        worker.forward_backward(sequences)
        worker.optim_step()
        weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
        boxes = wrong = 0
        names = set()
        for chunk in engine.state_chunks():
            if chunk.name.startswith("optimizer.state.param."):
                whole = weights[chunk.name.removeprefix("optimizer.state.param.")]
                index = tuple(slice(b, b + n) for b, n in zip(chunk.offset, chunk.tensor.shape, strict=True))
                boxes += 1
                wrong += not torch.equal(chunk.tensor.to(whole.dtype), whole[index])
                names.add(chunk.name)
        return {"boxes": boxes, "wrong": wrong, "head": any("value_head" in name for name in names)}

    def head(self, layout: dict[str, Any]) -> dict[str, Any]:
        """Of bf16 models with and without `fp32_lm_head`: the dtype of their logits, and three steps."""
        outcome: dict[str, Any] = {}
        for in_fp32 in ("true", "false"):
            engine = self.engine("tiny", layout, SLOWLY, "precision=bfloat16", f"fp32_lm_head={in_fp32}")
            dtypes: list[str] = []
            engine.model.chunks[-1].output_layer.register_forward_hook(
                lambda _, __, output, found=dtypes: found.append(str(output[0].dtype))
            )
            sequences = self.rollout(engine, "tiny")
            outcome[in_fp32] = {**self.train(engine, sequences, 3), "dtypes": sorted(set(dtypes))}
        return outcome

    def moved(self, layout: dict[str, Any], *overrides: str) -> dict[str, Any]:
        """A run whose state leaves and comes back after each step: losses, and whether it is saved alike meanwhile."""
        engine = self.engine("tiny", layout, SLOWLY, *overrides, moves_on_host=True)
        sequences = self.rollout(engine, "tiny")
        outcome: dict[str, Any] = {"losses": [], "same": [], "emptied": []}
        for step in range(4):
            outcome["losses"] += self.train(engine, sequences, 1)["losses"]
            before, exported = digests(engine), exports(engine)
            (engine.offload if step % 2 else engine.offload_optimizer)()
            outcome["emptied"].append(engine._optimizer_state.occupied and engine._weights.occupied == bool(step % 2))
            outcome["same"].append((before, exported) == (digests(engine), exports(engine)))
            engine.onload()
            outcome["same"].append(before == digests(engine))
        return outcome

    def save(self, engine: TrainEngine, root: Path, identity: str = "tiny", run_config: str = "") -> None:
        config = CheckpointingConfig(checkpoint_dir=str(root))
        ranks = Ranks(self.rank, self.world, str(root)) if self.world > 1 else Ranks.alone()
        manager = CheckpointManager(config, "run", identity, ranks)
        try:
            manager.save(STEPS, {"policy": engine.state_chunks()}, {"step": STEPS}, run_config, None, 1, [engine.fence])
            manager.wait_committed(60.0)
        finally:
            manager.close()

    def save_and_go_on(self, name: str, layout: dict[str, Any], *overrides: str) -> dict[str, Any]:
        engine = self.engine("tiny", layout, SLOWLY, *overrides)
        sequences = self.rollout(engine, "tiny")
        self.train(engine, sequences)
        self.save(engine, self.folder / name)
        return self.train(engine, sequences)

    def load_and_go_on(self, source: str, name: str, layout: dict[str, Any], *overrides: str) -> dict[str, Any]:
        """From what `source` saved, after a step that the checkpoint must undo."""
        engine = self.engine("tiny", layout, SLOWLY, *overrides)
        sequences = self.rollout(engine, "tiny")
        self.train(engine, sequences, 1)
        (folder,) = (self.folder / source).glob("step_*")
        engine.load_chunks(Checkpoint.open_to_load(folder).component("policy"))
        self.save(engine, self.folder / name)
        return self.train(engine, sequences)

    def refused(self, source: str, layout: dict[str, Any]) -> dict[str, Any]:
        """What a model says of a checkpoint with more than it has: here the masters of one in bf16."""
        engine = self.engine("tiny", layout, SLOWLY)
        (folder,) = (self.folder / source).glob("step_*")
        try:
            engine.load_chunks(Checkpoint.open_to_load(folder).component("policy"))
        except UserError as error:
            return {"said": str(error)}
        return {"said": ""}


def digests(engine: TrainEngine) -> dict[str, int]:
    return {f"{chunk.name} {chunk.offset}": digest(chunk.tensor) for chunk in engine.state_chunks()}


def exports(engine: TrainEngine) -> dict[str, int]:
    return {name: digest(tensor) for name, tensor in engine.export_weights()}


def run(job: Job, outcome: dict[str, Any]) -> None:
    for layout, sizes in LAYOUTS[job.world].items():
        for model in FAMILIES:
            if fits(model, layout):
                outcome[f"{model} {layout}"] = job.scenario(model, sizes)
    if job.world == 4:
        outcome["save"] = job.save_and_go_on("saved", {**TP, **PP})
        outcome["save bf16"] = job.save_and_go_on("saved-bf16", {**TP, **PP}, "precision=bfloat16")
    if job.world == 2:
        outcome["tiny pp2-vpp2"] = job.scenario("tiny", VPP)
        outcome["tiny tp2-sp-recompute"] = job.scenario("tiny", {**SP, "activation_checkpointing": True})
        outcome["moved tp2"] = job.moved(TP)
        outcome["moved dp2 bf16"] = job.moved({}, "precision=bfloat16")
        outcome["head tp2-sp"] = job.head(SP)
        outcome["masters dp2"] = job.masters({})
        outcome["masters tp2"] = job.masters(TP)
        outcome["value tp2-sp"] = job.value_scenario(SP)
        outcome["value pp2"] = job.value_scenario(PP)
        outcome["value cp2"] = job.value_scenario(CP)
        outcome["load tp2"] = job.load_and_go_on("saved", "again-tp2", TP)
        outcome["load dp2"] = job.load_and_go_on("saved", "again-dp2", {})
        outcome["refused tp2"] = job.refused("saved-bf16", TP)
        outcome["load bf16 dp2"] = job.load_and_go_on("saved-bf16", "again-bf16-dp2", {}, "precision=bfloat16")
    if job.world == 1:
        alone = Job(job.folder, 1, 0, torch_backend=True)
        for model in (*FAMILIES, "tiny"):
            outcome[f"{model} torch"] = alone.scenario(model, {})
        outcome["value torch"] = alone.value_scenario({})
        outcome["load one"] = job.load_and_go_on("saved", "again-one", {})
        outcome["load torch"] = alone.load_and_go_on("saved", "again-torch", {})


def in_turns(folder: Path, rank: int, run: Callable[[Any, dict[str, Any]], None], kind: type[Job] = Job) -> None:
    """Jobs of four, two and one rank, as this process takes part in them; FOLDER/RANK.json says what came out."""
    torch.set_num_threads(1)
    cpu.enable()
    from megatron.core import optimizer

    optimizer.USING_PYTORCH_OPTIMIZER, optimizer.Adam = False, None  # as where there is another than torch's
    outcome: dict[str, Any] = {}
    for world, ranks in ((4, (0, 1, 2, 3)), (2, (0, 1)), (1, (3,))):
        if rank in ranks:
            place = ranks.index(rank)
            rendezvous = f"file://{folder}/rendezvous-{world}"
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=place, world_size=world, timeout=timedelta(seconds=240)
            )
            run(kind(folder, world, place), outcome)
            dist.barrier()
            dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(outcome))


def main(folder: Path, rank: int) -> None:
    for model in FAMILIES:
        if rank == 0:
            make_model(model, folder)
    in_turns(folder, rank, run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
