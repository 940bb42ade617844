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
    """What was exported, into a model that has other weights."""
    from megatron.core import dist_checkpointing

    engine = job.engine(model, LAYOUTS[job.world][layout], f"precision={precision}")
    expected = load_file(job.folder / f"{model}-{source_of(model)}.safetensors")
    before = {name: torch.equal(tensor, expected[name]) for name, tensor in engine.export_weights()}
    state = sharded(engine, {}, loading=True, optimizer=False)
    folder = str(job.folder / f"exported-{model}")
    loaded, missing, unexpected = dist_checkpointing.load(state, folder, strict="return_all")
    engine.model.chunks[0].load_state_dict(loaded["model"])
    after = {name: torch.equal(tensor, expected[name]) for name, tensor in engine.export_weights()}
    return {
        "equal before": sum(before.values()),
        "equal": after.keys() == expected.keys() and all(after.values()),
        "missing": sorted(missing),
        "unexpected": sorted(unexpected),
        "iteration": loaded["iteration"],
    }


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
