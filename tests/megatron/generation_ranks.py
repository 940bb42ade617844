"""One of four processes: generates with the model that megatron-core trains, and with a transformers copy of it.

`python generation_ranks.py FOLDER RANK`; test_generation.py starts four and reads FOLDER/RANK.json. As in
engine_ranks.py all four are one job first, then ranks 0 and 1, then rank 3 alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "engines")]

import torch
import torch.distributed as dist
from engine_ranks import CP, EP, PP, SP, TP, VPP, Job, in_turns
from families import VOCABULARY, make_model
from transformers import GenerationConfig

from headwater.data.types import Problem, Prompt, SamplingParams
from headwater.engines.base import GenerateEngine
from headwater.engines.generate.trainers import CopiedWeights
from headwater.models.resolve import load_tokenizer, resolve

DENSE, MOE = ("llama-tied", "qwen3"), ("mixtral", "qwen2_moe")
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {"dp2": {}, "tp2": TP, "tp2-sp": SP, "pp2": PP, "cp2": CP, "ep2": EP},
    4: {
        "tp2-pp2": {**TP, **PP},
        "tp2-sp-cp2": {**SP, **CP},
        "ep2-dp2": EP,
        "ep2-pp2": {**EP, **PP},
        "ep2-tp2-sp-pp2": {**EP, **SP, **PP, "expert_tensor_parallel_size": 1},
        "ep4-tp2-sp": {**SP, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
    },
}
PROBLEM = Problem(0, [{"role": "user", "content": ""}])
SAMPLED = {"greedy": {"temperature": 0.0}, "sampled": {"seed": 3}}


def fits(model: str, layout: str) -> bool:
    """Experts are what EP cuts, and under tensor parallelism they want sequence parallelism.

    One model of each kind runs at every layout; norms of heads and shared experts are cut by the layouts named here.
    """
    if model in ("qwen3", "qwen2_moe") and layout not in ("one", "tp2", "tp2-sp", "pp2", "ep2"):
        return False
    if model in MOE:
        return "tp2" not in layout or "sp" in layout
    return not layout.startswith("ep")


def prompts(count: int = 5) -> list[Prompt]:
    tokens = [5, 3, 8, 1, 9, 4, 7, 10]
    return [Prompt(draw, PROBLEM, tuple(tokens[: 1 + 3 * draw % 7])) for draw in range(count)]


def scenario(job: Job, model: str, layout: dict[str, Any]) -> dict[str, Any]:
    """After a step of training; with a step after it, which must be that of an engine that never generated."""
    from headwater.engines.megatron.generate import MegatronGenerator
    from headwater.engines.megatron.modules import MaskedAttention

    engine, silent = (job.engine(model, layout, "optimizer.lr=0.02") for _ in range(2))
    path = resolve("builtin:tiny") if model == "tiny" else job.folder / model
    device, tokenizer = torch.device("cpu"), load_tokenizer(resolve("builtin:tiny"))
    copied = CopiedWeights(engine, path, torch.float32, device, tokenizer, max_batch_size=6)
    own = MegatronGenerator(engine, path, device, tokenizer, max_batch_size=6)
    sequences = job.rollout(engine, model)
    untrained = answers(own, "sampled")[0]
    for one in (engine, silent):
        job.train(one, sequences, 1)
    copied.receive_weights(1)
    own.receive_weights(1)
    outcome: dict[str, Any] = {
        kind: {"found": answers(own, kind), "expected": answers(copied, kind)} for kind in SAMPLED
    }
    outcome["changed"] = untrained != outcome["sampled"]["found"][0]
    modules = [module for chunk in engine.model.chunks for module in chunk.modules()]
    attentions = [module for module in modules if isinstance(module, MaskedAttention)]
    looks: list[bool] = []
    hook = attentions[0].register_forward_pre_hook(lambda _, args: looks.append(bool(args[3].any(-1).all())))
    outcome["padding looks"] = [answers(own, "greedy") == outcome["greedy"]["found"], all(looks), len(looks) > 0]
    hook.remove()
    alone = [group[0].token_ids for group in own.generate(prompts(1), 1, SamplingParams(max_new_tokens=8, seed=3))]
    outcome["alone"] = [list(tokens) for tokens in alone] == outcome["sampled"]["found"][0][:1]
    outcome["caches"] = [attention.cache is not None for attention in attentions]
    outcome["inputs"] = [chunk.decoder.input_tensor is not None for chunk in engine.model.chunks]
    outcome["disturbed"] = disturbed(engine, own)
    outcome["goes on"] = job.train(engine, sequences, 1) == job.train(silent, sequences, 1)
    return outcome


def disturbed(engine: Any, generator: GenerateEngine) -> list[list[int]]:
    """Tokens, where each rank gets other logits, as atomic additions on GPUs make them: ranks still have to agree."""
    noise = torch.randn(512, generator=torch.Generator().manual_seed(dist.get_rank()))
    hooks = [
        chunk.output_layer.register_forward_hook(
            lambda _, __, output: (output[0] + noise[: output[0].shape[-1]], output[1])
        )
        for chunk in engine.model.chunks
        if chunk.post_process
    ]
    tokens = answers(generator, "greedy")[0]
    for hook in hooks:
        hook.remove()
    return tokens


def answers(generator: GenerateEngine, kind: str) -> tuple[list[list[int]], list[list[float]], list[str], list[int]]:
    """Tokens, log-probabilities, why each ended, and versions."""
    params = SamplingParams(max_new_tokens=8, **SAMPLED[kind])
    found = [completion for group in generator.generate(prompts(), 3, params) for completion in group]
    return (
        [list(completion.token_ids) for completion in found],
        [completion.logprobs.tolist() for completion in found],
        [completion.finish_reason for completion in found],
        [completion.weight_version for completion in found],
    )


def run(job: Job, outcome: dict[str, Any]) -> None:
    for layout, sizes in LAYOUTS[job.world].items():
        for model in (*DENSE, *MOE):
            if fits(model, layout):
                outcome[f"{model} {layout}"] = scenario(job, model, sizes)
    if job.world == 2:
        outcome["tiny pp2-vpp2"] = scenario(job, "tiny", VPP)
        outcome["qwen3 tp2-sp-lora"] = scenario(job, "qwen3", {**SP, "peft.enabled": "true"})


def main(folder: Path, rank: int) -> None:
    if rank == 0:
        for model in (*DENSE, *MOE):
            ends = GenerationConfig(eos_token_id=[2, VOCABULARY - 1])
            ends.save_pretrained(make_model(model, folder))
    in_turns(folder, rank, run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
