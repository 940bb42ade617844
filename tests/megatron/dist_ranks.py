"""One of four processes: saves and loads small models by megatron-core's own `dist_checkpointing`.

`python dist_ranks.py FOLDER RANK`; test_torch_dist.py starts four and reads FOLDER/RANK.json. Ranks 0 and 1 are a job
of two that saves, then rank 3 saves alone, and each loads what was exported from a checkpoint of the job of two.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "engines")]

import torch
import torch.distributed as dist
from engine_ranks import EP, PP, SP, TP, Job
from families import MOE, make_model
from safetensors.torch import load_file, save_file

from headwater.checkpoint.export_megatron import export_megatron
from headwater.checkpoint.reader import Checkpoint
from headwater.engines.megatron import cpu
from headwater.models.resolve import model_identity

MODELS = ("llama-tied", "qwen2", "qwen3_moe", "mixtral")
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {1: {"one": {}}, 2: {"tp2": TP, "tp2-sp": SP, "pp2": PP, "ep2": EP}}
RUN_CONFIG = "policy: {optimizer: {lr: 0.001, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.01}}"
PER_LAYER = {"non_homogeneous_layers": True}


def fits(model: str, layout: str) -> bool:
    """Experts under tensor parallelism want sequence parallelism."""
    return layout in (("one", "tp2-sp", "pp2", "ep2") if model in MOE else ("one", "tp2", "pp2"))


def source_of(model: str) -> str:
    """The layout whose checkpoint is exported: none of a kind that all others have."""
    return "ep2" if model in MOE else "tp2"


def sharded(engine: Any, metadata: dict[str, Any], *, loading: bool = False, optimizer: bool = True) -> dict[str, Any]:
    """As Megatron's own training saves and loads."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True, **metadata}
    model = engine.model.chunks[0].sharded_state_dict(metadata=metadata)
    state = {"model": model, "iteration": 2}
    if optimizer:
        state["optimizer"] = engine.optimizer._megatron.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return state


def save(job: Job, model: str, layout: str, precision: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """By Megatron, as Headwater's checkpoint, and the weights that both should hold."""
    from megatron.core import dist_checkpointing

    name = f"{model}-{layout}"
    engine = job.engine(model, LAYOUTS[job.world][layout], f"precision={precision}")
    trained = job.train(engine, job.rollout(engine, model), 2)
    folder = job.folder / f"megatron-{name}"
    if job.rank == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(sharded(engine, metadata), str(folder), ("torch_dist", 1))
    weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
    if job.rank == 0:
        save_file(weights, job.folder / f"{name}.safetensors")
    job.save(engine, job.folder / f"headwater-{name}", model_identity(job.folder / model), RUN_CONFIG)
    dist.barrier()
    return trained


def export(job: Job, model: str) -> None:
    (saved,) = (job.folder / f"headwater-{model}-{source_of(model)}").glob("step_*")
    export_megatron(Checkpoint.open(saved), "policy", job.folder / f"exported-{model}", job.folder / model)


def load(job: Job, model: str, layout: str, precision: str) -> dict[str, Any]:
    """What was exported, into a model that has other weights, and another step behind it."""
    from megatron.core import dist_checkpointing

    engine = job.engine(model, LAYOUTS[job.world][layout], f"precision={precision}")
    job.train(engine, job.rollout(engine, model), 1)
    expected = load_file(job.folder / f"{model}-{source_of(model)}.safetensors")
    before = {name: torch.equal(tensor, expected[name]) for name, tensor in engine.export_weights()}
    chained = len(engine.optimizer._optimizers) > 1
    with torch.no_grad():
        state = sharded(engine, {}, loading=True, optimizer=not chained)
        folder = str(job.folder / f"exported-{model}")
        loaded, unasked, missing = dist_checkpointing.load(state, folder, strict="return_all")
        engine.model.chunks[0].load_state_dict(loaded["model"])
        if not chained:
            load_optimizer(engine, loaded["optimizer"])
    after = {name: torch.equal(tensor, expected[name]) for name, tensor in engine.export_weights()}
    (saved,) = (job.folder / f"headwater-{model}-{source_of(model)}").glob("step_*")
    reader = Checkpoint.open(saved).component("policy")
    differing = []
    for chunk in () if chained else engine.state_chunks():
        index = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offset, chunk.tensor.shape, strict=True))
        if not torch.equal(chunk.tensor, reader.read(chunk.name)[index]):
            differing.append(chunk.name)
    return {
        "equal before": sum(before.values()),
        "equal": after.keys() == expected.keys() and all(after.values()),
        "chained": chained,
        "differing": differing,
        "missing": sorted(missing),
        "unasked": sorted(unasked),
        "iteration": loaded["iteration"],
    }


def load_optimizer(engine: Any, state: dict[str, Any]) -> None:
    """Megatron's own load forgets that torch's AdamW has a step for each parameter, and fails on every checkpoint."""
    (optimizer,) = engine.optimizer._optimizers
    put = optimizer._set_main_param_and_optimizer_states

    def put_with_step(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        put(parameter, {**tensors, "step": torch.tensor(optimizer.optimizer.param_groups[0]["step"])})

    optimizer._set_main_param_and_optimizer_states = put_with_step
    engine.optimizer._megatron.load_state_dict(state)


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    cpu.enable()
    outcome: dict[str, Any] = {}
    if rank == 0:
        for model in MODELS:
            make_model(model, folder)
    for world, ranks in ((2, (0, 1)), (1, (3,))):
        if rank not in ranks:
            continue
        while world == 1 and not (folder / "saved").exists():
            time.sleep(0.1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous-{world}",
            rank=ranks.index(rank),
            world_size=world,
            timeout=timedelta(seconds=240),
        )
        job = Job(folder, world, ranks.index(rank))
        dist.barrier()
        for layout in LAYOUTS[world]:
            for model in (model for model in MODELS if fits(model, layout)):
                precision = "bfloat16" if model != "llama-tied" else "float32"
                metadata = PER_LAYER if layout == "pp2" else {}
                outcome[f"save {model} {layout}"] = save(job, model, layout, precision, metadata)
        if rank == 0:
            for model in MODELS:
                export(job, model)
            (folder / "saved").touch()
        dist.barrier()
        for layout in LAYOUTS[world]:
            for model in (model for model in MODELS if fits(model, layout)):
                precision = "bfloat16" if model != "llama-tied" else "float32"
                outcome[f"load {model} {layout}"] = load(job, model, layout, precision)
        dist.barrier()
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
