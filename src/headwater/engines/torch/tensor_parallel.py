"""Tensor parallelism of Llama and Qwen models in transformers, with and without sequence parallelism.

Megatron-LM's cut (Shoeybi et al., 2019, arXiv:1909.08053): attention by heads, the MLP by its inner width, embedding
and head by vocabulary. With sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198) what lies between, norms
and residuals, is cut by position, and each all-reduce becomes a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from headwater.engines.torch.parallel import Layout


def parallelize(model: PreTrainedModel, layout: Layout) -> None:
    """Cut the model's parameters over the tensor-parallel ranks, in place; `check_model` has let it pass.

    Logits become a DTensor, cut by vocabulary; values stay plain tensors. A tied head stays tied. Parameters of norms
    stay whole on each rank.
    """
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight  # pyright: ignore
    parallelize_module(model, layout.axis("tensor"), _plan(model, layout.sequence_parallel))
    if tied:  # both were cut by rows, each for itself
        model.get_output_embeddings().weight = model.get_input_embeddings().weight  # pyright: ignore
    if layout.sequence_parallel:
        model.get_submodule("model.norm").register_forward_hook(_whole_sequence)


def _plan(model: PreTrainedModel, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    between = Shard(1) if sequence_parallel else Replicate()
    layer = "model.layers.*"
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        f"{layer}.self_attn.o_proj": RowwiseParallel(output_layouts=between),
        f"{layer}.mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if "lm_head" in dict(model.named_children()):  # the head of a value model is whole on each rank
        plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"{layer}.{name}"] = ColwiseParallel()
    if model.config.model_type == "qwen3":  # norms of each head: a rank sees its own heads, dimension 2, alone
        for name in ("q_norm", "k_norm"):
            plan[f"{layer}.self_attn.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if sequence_parallel:
        whole: dict[str, Any] = {"hidden_states": Replicate()}
        plan |= {
            f"{layer}.input_layernorm": SequenceParallel(),
            f"{layer}.post_attention_layernorm": SequenceParallel(),
            f"{layer}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts=whole
            ),
            f"{layer}.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "model.norm": SequenceParallel(),
        }
    return plan


def _whole_sequence(_module: nn.Module, _args: Any, output: DTensor) -> Any:
    """The head's positions are picked from the whole sequence."""
    return output.full_tensor()
