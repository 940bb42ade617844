"""A megatron-core GPT model from a Hugging Face folder: this rank's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from headwater.bridge.adapters import with_adapters
from headwater.bridge.family import Family, ParameterMap, head_size
from headwater.bridge.pieces import Copied, Dimensions, Piece, Place, Slot, padded_vocabulary
from headwater.config.schema import MegatronConfig, PeftConfig
from headwater.engines.megatron.lora import Adapter, add_adapters
from headwater.engines.megatron.modules import MaskedAttention, MegatronValueHead, RMSNorm, RotaryAtPositions
from headwater.engines.torch.value import HEAD_NAME
from headwater.errors import UserError

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_ADAPTER = ".adapter."


@dataclass(frozen=True)
class MappedParameter:
    """A parameter of this rank. name: with layers and experts numbered over the whole model.

    owned: whether this rank is the one of its data-parallel group that saves and exports it. tied_copy: of an embedding
    that stands on another pipeline stage. adapter: of the layer whose weight it is, None where that has none.
    """

    name: str
    parameter: torch.nn.Parameter
    pieces: list[Piece]
    owned: bool
    tied_copy: bool
    adapter: Adapter | None

    @property
    def is_of_adapter(self) -> bool:
        """Whether it is part of an adapter: no weight of the base model."""
        return _ADAPTER in self.name


@dataclass(frozen=True)
class MegatronModel:
    """This rank's part of a model. chunks: one GPTModel, or one for each virtual pipeline stage."""

    chunks: list[Any]
    config: TransformerConfig
    dims: Dimensions
    map: ParameterMap

    def parameters(self) -> Sequence[MappedParameter]:
        """Of all chunks. Names and pieces are worked out once; a save asks for them in its call."""
        return self._mapped

    @cached_property
    def _mapped(self) -> list[MappedParameter]:
        found = []
        state = parallel_state
        is_first = state.get_data_parallel_rank(with_context_parallel=True) == 0
        is_first_of_expert = state.get_expert_data_parallel_rank() == 0
        for chunk in self.chunks:
            for local, parameter in chunk.named_parameters():
                name = global_name(chunk, local, self.dims.experts)
                tied = name == OUTPUT and chunk.share_embeddings_and_output_weights
                pieces = self.map.pieces(EMBEDDING if tied else name)
                owned = (is_first_of_expert if ".local_experts." in name else is_first) and not tied
                module, _, kind = local.rpartition(".")
                adapter = getattr(chunk.get_submodule(module), "adapter", None) if kind == "weight" else None
                found.append(MappedParameter(name, parameter, pieces, owned, tied, adapter))
        return found


def place_of_this_rank() -> Place:
    """As Megatron's parallel state says."""
    state = parallel_state
    return Place(
        tensor=Slot(state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()),
        expert=Slot(state.get_expert_model_parallel_world_size(), state.get_expert_model_parallel_rank()),
        expert_tensor=Slot(state.get_expert_tensor_parallel_world_size(), state.get_expert_tensor_parallel_rank()),
    )


def global_name(chunk: Any, name: str, experts: int) -> str:
    """A parameter's name with its layer, and its expert, numbered over all ranks."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        index = parts.index("local_experts") + 1
        slot = place_of_this_rank().expert
        parts[index] = str(int(parts[index]) + experts // slot.size * slot.rank)
    return ".".join(parts)


def build(
    family: Family,
    hf_config: Any,
    megatron: MegatronConfig,
    dtype: torch.dtype,
    *,
    values: bool = False,
    peft: PeftConfig | None = None,
) -> MegatronModel:
    """Not initialized. hf_config: a transformers configuration, for which `check_sizes` found nothing wrong.

    values: with a head of one output in place of the language model's. peft: adapters that are trained, while all but
    such a head is frozen; those are initialized.

    Raises UserError for an embedding of positions that is not mapped.
    """
    dims = family.dims(hf_config)
    config = transformer_config(family, hf_config, megatron, dtype)
    place = place_of_this_rank()
    virtual = megatron.virtual_pipeline_model_parallel_size
    tied = hf_config.tie_word_embeddings and not values
    stages = range(virtual) if virtual else (None,)
    chunks = [_chunk(config, dims, hf_config, place, stage, tied=tied) for stage in stages]
    if peft is not None:
        family = with_adapters(family, peft.target_modules, peft.rank)
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_begin_gradients)
    if values:
        family = with_value_head(family)
        for chunk in chunks:
            if chunk.post_process:
                chunk.output_layer = MegatronValueHead(dims.hidden)
    model = MegatronModel(chunks, config, dims, ParameterMap(family, dims, place))
    for chunk in chunks:
        if peft is not None:
            add_adapters(chunk, partial(global_name, chunk, experts=dims.experts), model.map, peft)
        named = {global_name(chunk, name, dims.experts): parameter for name, parameter in chunk.named_parameters()}
        model.map.check({name: tuple(parameter.shape) for name, parameter in named.items()})
        for name, parameter in named.items():
            # Megatron says so where it initializes at random; by this it counts a gradient once in the norm.
            parameter.tensor_model_parallel = model.map.is_cut(name)
    return model


def _begin_gradients(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Recomputed layers pass gradients on only to inputs that need one, which what is frozen does not give."""
    return embedded.requires_grad_(torch.is_grad_enabled())


def transformer_config(
    family: Family, hf_config: Any, megatron: MegatronConfig, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's configuration of a model. What computes in another order for speed alone is off."""
    settings: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_size(hf_config),
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": megatron.virtual_pipeline_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
        "sequence_parallel": megatron.sequence_parallel,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        # With these defaults of Megatron's the interleaved schedule of two stages mixes up microbatches.
        "overlap_p2p_comm": megatron.virtual_pipeline_model_parallel_size is not None,
        "batch_p2p_comm": megatron.virtual_pipeline_model_parallel_size is None,
    }
    if megatron.activation_checkpointing:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if hasattr(hf_config, "num_experts_per_tok"):
        settings |= {
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": False,
            "moe_token_dispatcher_type": "alltoall",
            "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size,
        }
    return TransformerConfig(**settings | family.settings(hf_config))


def with_value_head(family: Family) -> Family:
    """The same family with a head of one output, as the torch backend names it."""
    head = (
        Copied(OUTPUT, f"{HEAD_NAME}.weight", (1, "hidden")),
        Copied("output_layer.bias", f"{HEAD_NAME}.bias", (1,)),
    )
    return replace(family, rules=(*head, *(rule for rule in family.rules if rule.megatron != OUTPUT)))


def _chunk(
    config: TransformerConfig, dims: Dimensions, hf_config: Any, place: Place, stage: int | None, *, tied: bool
) -> Any:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    submodules: Any = spec.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    attention = submodules.self_attention.submodules
    attention.core_attention = MaskedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=stage)
    ignore = stage is None
    chunk: Any = GPTModel(
        config,
        TransformerBlockSubmodules([spec] * layers, RMSNorm),
        padded_vocabulary(dims.vocabulary, place.tensor.size),
        hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=ignore, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=ignore, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="none",
        vp_stage=stage,
    )
    chunk.position_embedding_type, chunk.mrope_section = "mrope", None
    chunk.rotary_pos_emb = RotaryAtPositions(_inverse_frequencies(hf_config))
    return chunk


def _inverse_frequencies(hf_config: Any) -> torch.Tensor:
    """fp32 [D / 2], of each pair of a head's dimensions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf_config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, head_size(hf_config), 2, dtype=torch.float32, device="cpu") / head_size(hf_config)
        return 1.0 / parameters["rope_theta"] ** exponents
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    if scale != 1.0 or kind in ("dynamic", "longrope"):
        raise UserError(f"the bridge to Megatron does not know rotary embeddings of the kind {kind}")
    return frequencies


def check_sizes(dims: Dimensions, hf_config: Any, megatron: MegatronConfig, group: str) -> None:
    """Raise UserError, naming the key, where a parallel size does not divide what it cuts."""
    cut = f"{group}.megatron_cfg."
    tensor, stages = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    layers, virtual = hf_config.num_hidden_layers, megatron.virtual_pipeline_model_parallel_size or 1
    expert_tensor = megatron.expert_tensor_parallel_size or tensor
    wanted = [
        ("tensor_model_parallel_size", tensor, "attention heads", dims.heads),
        ("tensor_model_parallel_size", tensor, "query groups (num_key_value_heads)", dims.query_groups),
        ("tensor_model_parallel_size", tensor, "width of the feed-forward layer", dims.feed_forward),
        ("pipeline_model_parallel_size x virtual stages", stages * virtual, "layers", layers),
        ("expert_model_parallel_size", megatron.expert_model_parallel_size, "experts", dims.experts),
        ("expert_tensor_parallel_size", expert_tensor, "width of an expert", dims.expert_feed_forward),
    ]
    for key, size, what, length in wanted:
        if length % size:
            raise UserError(f"{cut}{key} ({size}) does not divide the model's {what} ({length})")
    if dims.experts and tensor > 1 and not megatron.sequence_parallel:
        raise UserError(f"{cut}sequence_parallel must be true for a model with experts under tensor parallelism")
    if megatron.expert_model_parallel_size > 1 and not dims.experts:
        raise UserError(f"{cut}expert_model_parallel_size: the model has no experts; set it to 1")


_sizes: dict[str, Any] = {}
"""That Megatron's groups of ranks were made for."""


def initialize(megatron: MegatronConfig, seed: int = 0) -> None:
    """Make Megatron's groups of ranks over torch's default group, once a process.

    Where there is no default group, this process makes one of itself alone. Raises UserError where the sizes do not
    make up the number of ranks, or differ from those before.
    """
    import torch.distributed as dist
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore
    world = dist.get_world_size()
    sizes = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    of_experts = (
        megatron.expert_model_parallel_size
        * (megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size)
        * megatron.pipeline_model_parallel_size
    )
    for what, size in (("tensor x pipeline x context", sizes), ("expert x expert-tensor x pipeline", of_experts)):
        if world % size:
            raise UserError(
                f"megatron_cfg: {what} parallel sizes make {size}, which does not divide the number of ranks ({world})"
            )
    wanted = {key: size for key, size in megatron.model_dump().items() if key.endswith("_size")}
    if parallel_state.model_parallel_is_initialized():
        if _sizes != wanted:
            raise UserError(
                "megatron-core has one set of parallel sizes a process: give policy.megatron_cfg and "
                "value.megatron_cfg the same"
            )
        return
    _sizes.update(wanted)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def forget_parallel_sizes() -> None:
    """Give up Megatron's groups of ranks, so that others can be made. What was built with them is of no use then."""
    parallel_state.destroy_model_parallel()
    _sizes.clear()
