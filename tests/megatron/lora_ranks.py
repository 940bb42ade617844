"""One of four processes: trains adapters of small models with megatron-core and PEFT, and writes down what it saw.

`python lora_ranks.py FOLDER RANK`; test_lora.py starts four and reads FOLDER/RANK.json. All four are one job first;
then ranks 0 and 1 are a job of two, while rank 3 does what one process does, with PEFT too.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_ranks import LAYOUTS as OF_WEIGHTS
from engine_ranks import PP, SLOWLY, SP, TP, VPP, Job, digests, in_turns
from families import MOE, make_model
from parallel_ranks import rollout
from safetensors.torch import load_file, save_file

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.digest import digest
from headwater.config.load import load_config
from headwater.data.types import TrainSequence
from headwater.engines.base import ForwardBackward, LossFn, OptimStep
from headwater.errors import UserError
from headwater.models.resolve import resolve

RANK, ALPHA = 3, 12.0
RECOMPUTE = {"activation_checkpointing": True}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    **OF_WEIGHTS,
    1: {**OF_WEIGHTS[1], "one-recompute": RECOMPUTE},
    2: {**OF_WEIGHTS[2], "pp2-recompute": {**PP, **RECOMPUTE}, "tp2-sp-recompute": {**SP, **RECOMPUTE}},
}
MODELS = ("llama", "llama-tied", "qwen2", "qwen3", "qwen3_moe", "mixtral")
PEFT = ("megatron_cfg.peft.enabled=true", f"megatron_cfg.peft.rank={RANK}", f"megatron_cfg.peft.alpha={ALPHA}")
ATTENTION = "megatron_cfg.peft.target_modules=[linear_qkv,linear_proj]"
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OF_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def fits(model: str, layout: str) -> bool:
    """Every kind of parallelism with a dense model; with experts those that make a difference to attention."""
    if model in MOE:
        return layout in ("one", "tp2-sp", "ep2", "ep2-tp2-sp-pp2")
    return "ep2" not in layout and (model in ("llama", "llama-tied") or layout in ("one", "tp2", "tp2-sp", "pp2"))


def matrices(model: str) -> tuple[str, ...]:
    return OF_ATTENTION if model in MOE else (*OF_ATTENTION, *OF_FEED_FORWARD)


def options(model: str) -> tuple[str, ...]:
    return (*PEFT, ATTENTION) if model in MOE else PEFT


class PeftEngine:
    """`TrainEngine` by PEFT and torch's AdamW, one sequence at a time: nothing is packed, nothing is shared."""

    def __init__(self, path: Path, targets: Sequence[str], adapters: dict[str, torch.Tensor]) -> None:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
        from transformers import AutoModelForCausalLM

        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), task_type="CAUSAL_LM")  # pyright: ignore
        self.model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)
        loaded = set_peft_model_state_dict(self.model, {f"base_model.model.{k}": v for k, v in adapters.items()})
        assert not loaded.unexpected_keys
        assert not [name for name in loaded.missing_keys if "lora_" in name]
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        assert len(self._trained) == len(adapters) > 0
        self._adam = torch.optim.AdamW(self._trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    @property
    def num_trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._trained)

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [logprobs_of(self.model, sequence) for sequence in sequences]

    def forward_backward(
        self, sequences: Sequence[TrainSequence], loss_fn: LossFn, denominator: float
    ) -> ForwardBackward:
        loss, stats = loss_fn(torch.cat([logprobs_of(self.model, sequence) for sequence in sequences]), sequences)
        (loss / denominator).backward()
        return ForwardBackward(loss.item(), stats)

    def optim_step(self) -> OptimStep:
        norm = torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._adam.step()
        self._adam.zero_grad()
        return OptimStep(norm.item(), 1e-3)


def logprobs_of(model: Any, sequence: TrainSequence) -> torch.Tensor:
    """[C] fp32 of a sequence that stands alone in its row."""
    tokens = torch.cat([sequence.prompt_ids, sequence.completion_ids])
    logits = model(tokens[None]).logits[0, len(sequence.prompt_ids) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, sequence.completion_ids[:, None])[:, 0]


class LoraJob(Job):
    def scenario(self, model: str, layout: dict[str, Any], *overrides: str) -> dict[str, Any]:
        engine = self.engine(model, layout, *options(model), *overrides)
        frozen = {m.name: digest(m.parameter) for m in engine.model.parameters() if not m.is_of_adapter}
        adapters = {name: value for name, value in digests(engine).items() if "optimizer." not in name}
        with torch.no_grad():
            at_first = {name: tensor.clone() for name, tensor in engine.export_weights()}
        outcome = self.trained(engine, self.rollout(engine, model))
        after = {m.name: digest(m.parameter) for m in engine.model.parameters() if not m.is_of_adapter}
        adapters_after = {name: value for name, value in digests(engine).items() if "optimizer." not in name}
        exported = {name: tensor.clone() for name, tensor in engine.export_weights()}
        outcome["frozen"] = [len(frozen), sum(frozen[name] != after[name] for name in frozen)]
        outcome["changed"] = [len(adapters), sum(adapters[name] != adapters_after[name] for name in adapters)]
        outcome["saved"] = sorted(chunk.name for chunk in engine.state_chunks())
        outcome["bytes"] = [engine.checkpoint_bytes, sum(chunk.tensor.nbytes for chunk in engine.state_chunks())]
        stored = load_file(self.path(model) / "model.safetensors")
        outcome["exact at first"] = all(torch.equal(at_first[name], stored[name]) for name in stored)
        outcome["merged"] = self.merged(model, exported) if self.rank == 0 else None
        moved = [name for name in stored if not torch.equal(exported[name], stored[name])]
        outcome["moved"] = sorted(name for name in moved if not name.startswith("model.layers."))
        outcome["of layers moved"] = sorted({name.split(".")[-2] for name in moved if name.startswith("model.layers.")})
        return outcome

    def path(self, model: str) -> Path:
        return resolve("builtin:tiny") if model == "tiny" else make_model(model, self.folder)

    def trained(self, engine: Any, sequences: list[TrainSequence]) -> dict[str, Any]:
        outcome = self.train(engine, sequences)
        outcome["last"] = torch.cat(engine.logprobs(sequences)).tolist()
        return outcome | {"parameters": engine.num_trainable_parameters}

    def merged(self, model: str, exported: dict[str, torch.Tensor]) -> list[float]:
        """Log-probabilities of transformers' model with the exported weights."""
        from transformers import AutoModelForCausalLM

        folder = self.folder / f"merged-{self.world}-{model}"
        shutil.copytree(self.path(model), folder, dirs_exist_ok=True)
        save_file(exported, folder / "model.safetensors", metadata={"format": "pt"})
        with torch.no_grad():
            whole = AutoModelForCausalLM.from_pretrained(folder)
            return torch.cat([logprobs_of(whole, sequence) for sequence in rollout(11)]).tolist()

    def peft(self, model: str) -> dict[str, Any]:
        start = self.engine(model, {}, *options(model))
        engine = PeftEngine(self.path(model), matrices(model), whole(start.state_chunks()))
        return self.trained(engine, self.rollout(engine, model))  # pyright: ignore[reportArgumentType]

    def refused(self, model: str, *overrides: str) -> str:
        try:
            self.engine(model, {}, *overrides)
        except UserError as error:
            return str(error)
        return "not refused"

    def keeps_signs(self) -> bool:
        """Whether zeros below zero are exported as such where adapters add nothing: a digest sees the difference."""
        engine = self.engine("llama", {}, *PEFT)
        (weight,) = [
            m.parameter for m in engine.model.parameters() if m.name.endswith("layers.0.mlp.linear_fc2.weight")
        ]
        weight.data.fill_(-0.0)
        return bool(dict(engine.export_weights())["model.layers.0.mlp.down_proj.weight"].signbit().all())

    def reference(self, layout: dict[str, Any]) -> list[bool]:
        """Whether a frozen engine of a policy with adapters has none, and scores as the model without them."""
        words = [f"policy.megatron_cfg.{key}={value}" for key, value in layout.items()]
        words += ["policy.megatron_cfg.enabled=true", *(f"policy.{word}" for word in PEFT)]
        from headwater.engines.megatron.engine import MegatronEngine

        policy = self.engine("tiny", layout, *PEFT)
        config = load_config("grpo_tiny", words).config.policy
        frozen = MegatronEngine(config, self.path("tiny"), torch.device("cpu"), trainable=False)
        base, at_first = torch.cat(frozen.logprobs(rollout(259))), torch.cat(policy.logprobs(rollout(259)))
        self.train(policy, self.rollout(policy, "tiny"), 2)
        other = torch.cat(policy.logprobs(rollout(259)))
        no_adapters = not any(mapped.is_of_adapter for mapped in frozen.model.parameters())
        return [no_adapters, torch.allclose(base, at_first, atol=1e-5), not torch.allclose(base, other, atol=1e-3)]


def whole(chunks: Iterable[Chunk]) -> dict[str, torch.Tensor]:
    """Tensors put together from their boxes."""
    tensors: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        index = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offset, chunk.tensor.shape, strict=True))
        tensors.setdefault(chunk.name, torch.full(chunk.global_shape, torch.nan))[index] = chunk.tensor.detach()
    return tensors


def run(job: LoraJob, outcome: dict[str, Any]) -> None:
    for layout, sizes in LAYOUTS[job.world].items():
        for model in MODELS:
            if fits(model, layout):
                outcome[f"{model} {layout}"] = job.scenario(model, sizes)
    slow = (*PEFT, SLOWLY.replace("2e-5", "1e-3"))
    bf16 = (*slow, "precision=bfloat16")
    if job.world == 4:
        outcome["save"] = job.save_and_go_on("saved", {**TP, **PP}, *slow)
        outcome["save bf16"] = job.save_and_go_on("saved-bf16", {**TP, **PP}, *bf16)
    if job.world == 2:
        outcome["load tp2-sp"] = job.load_and_go_on("saved", "again-tp2-sp", SP, *slow)
        outcome["load pp2-vpp2"] = job.load_and_go_on("saved", "again-pp2-vpp2", VPP, *slow)
        outcome["load dp2"] = job.load_and_go_on("saved", "again-dp2", {}, *slow)
        outcome["load bf16 dp2"] = job.load_and_go_on("saved-bf16", "again-bf16-dp2", {}, *bf16)
        outcome["moved tp2"] = job.moved(TP, *PEFT)
        outcome["reference"] = job.reference(TP)
    if job.world == 1:
        for model in MODELS:
            outcome[f"{model} peft"] = job.peft(model)
        outcome["refused"] = job.refused("mixtral", *PEFT)
        outcome["keeps signs"] = job.keeps_signs()
        outcome["load one"] = job.load_and_go_on("saved", "again-one", {}, *slow)


def main(folder: Path, rank: int) -> None:
    if rank == 0:
        for model in MODELS:
            make_model(model, folder)
    in_turns(folder, rank, run, LoraJob)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
