"""One of four processes: the logits of SmolLM2-135M, by a Megatron model at some layouts and by transformers.

`python smollm2_ranks.py FOLDER RANK MODEL`; test_smollm2.py starts four and reads FOLDER/RANK.json. Ranks 0 to 2 are a
job of three, then ranks 0 and 1 are one of two, then rank 0 is alone.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from headwater.config.load import load_config
from headwater.data.types import TrainSequence
from headwater.engines.megatron import cpu
from headwater.models.resolve import load_model

PROMPT = tuple(range(100, 124))


def run(folder: Path, model: Path, overrides: dict[str, int]) -> dict[str, Any]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from headwater.engines.megatron.engine import MegatronEngine
    from headwater.engines.megatron.model import forget_parallel_sizes

    words = [f"policy.megatron_cfg.{key}={value}" for key, value in {"enabled": "true", **overrides}.items()]
    config = load_config("grpo", [*words, "policy.precision=float32"]).config
    engine = MegatronEngine(config.policy, model, torch.device("cpu"), trainable=False)
    found: list[torch.Tensor] = []
    expected = torch.load(folder / "logits.pt")
    # The output layer is asked for the predictors of a completion, which are all positions but the last.
    tokens = torch.tensor([*PROMPT, 0])
    zeros = torch.zeros(len(tokens) - 1)
    sequence = TrainSequence(0, tokens[:1], tokens[1:], zeros, zeros)

    def keep(_: Any, __: Any, output: tuple[torch.Tensor, Any]) -> None:
        found.append(gather_from_tensor_model_parallel_region(output[0])[:, 0, : engine.vocabulary])

    for chunk in engine.model.chunks:
        if chunk.post_process:
            chunk.output_layer.register_forward_hook(keep)
    engine.logprobs([sequence])
    logits: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(logits, found[0] if found else None)
    of_last = next(one for one in logits if one is not None)
    stored = load_file(model / "model.safetensors")
    exported = dict(engine.export_weights())
    exact = sum(torch.equal(tensor, stored[name].float()) for name, tensor in exported.items())
    outcome = {
        "shape": [1, *of_last.shape],
        "largest": float(expected.abs().max()),
        "difference": float((of_last - expected[0]).abs().max()),
        "same likeliest": bool((of_last.argmax(-1) == expected[0].argmax(-1)).all()),
        "exact": exact if exported.keys() == stored.keys() else -1,
    }
    forget_parallel_sizes()
    return outcome


def main(folder: Path, rank: int, model: Path) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        reference: Any = load_model(model, torch.float32)
        with torch.no_grad():
            torch.save(reference(torch.tensor([PROMPT])).logits, folder / "logits.pt")
        del reference
    cpu.enable()
    outcome: dict[str, Any] = {}
    layouts = (("tp3", 3, {"tensor_model_parallel_size": 3}), ("pp2", 2, {"pipeline_model_parallel_size": 2}))
    for name, world, overrides in (*layouts, ("one", 1, {})):
        if rank < world:
            rendezvous = f"file://{folder}/rendezvous-{world}"
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=240)
            )
            dist.barrier()
            outcome[name] = run(folder, model, overrides)
            dist.barrier()
            dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
