"""The keys that a model's parameters have in Megatron's `torch_dist` checkpoints.

Megatron stacks what all layers have under one key, `decoder.layers.mlp.linear_fc1.weight` [layers, rows, columns], and
of experts once more, `...mlp.experts.experts.linear_fc1.weight` [layers, experts, rows, columns]. Where layers differ,
or its metadata ask for it, each layer has its own key, `decoder.layers.3.mlp...`; an expert too. Tensor-parallel ranks
are boxes of the whole tensor, in which the two halves of a gated layer are not interleaved: what one rank would hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwater.bridge.family import Family, ParameterMap
from headwater.bridge.pieces import Piece, Place, Shape, Vocabulary, padded_vocabulary

_OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
# A norm is named after the layer that follows it, with which Transformer Engine computes it; not so before experts.
_NORMS = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
}


@dataclass(frozen=True)
class Key:
    """index: where the parameter stands along the dimensions that are stacked, their sizes are `stacked`."""

    name: str
    index: Shape
    stacked: Shape


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model. keys: that it may have, stacked ones first.

    shape: Megatron's; with more rows than pieces tell of where the vocabulary is padded, as `padded` says.
    """

    name: str
    pieces: list[Piece]
    keys: list[Key]
    shape: Shape
    padded: bool


def parameters(family: Family, config: Any) -> Iterator[Parameter]:
    """All of a model, layers in order. config: its transformers configuration."""
    dims = family.dims(config)
    known = ParameterMap(family, dims, Place())
    layers = config.num_hidden_layers
    of_layers = [rule for rule in family.rules if "{layer}" in rule.megatron]
    names = [
        rule.megatron.format(layer=layer, expert=expert)
        for layer in range(layers)
        for rule in of_layers
        for expert in range(dims.experts if "{expert}" in rule.megatron else 1)
    ]
    for rule in family.rules:
        if rule not in of_layers and not (rule.megatron == _OUTPUT and config.tie_word_embeddings):
            names.append(rule.megatron)
    vocabulary = {rule.megatron for rule in family.rules if isinstance(rule, Vocabulary)}
    for name in names:
        pieces = known.pieces(name)
        padded = name in vocabulary
        rows = padded_vocabulary(dims.vocabulary, 1) if padded else max(piece.rows.stop for piece in pieces)
        yield Parameter(name, pieces, _keys(name, layers, dims.experts), (rows, *pieces[0].shape[1:]), padded)


def _keys(name: str, layers: int, experts: int) -> list[Key]:
    in_layer = _LAYER.fullmatch(name)
    if not in_layer:
        return [Key(name, (), ())]
    layer, rest = int(in_layer[1]), in_layer[2]
    of_expert = _EXPERT.fullmatch(rest)
    found = [Key(alias, (), ()) for alias in _NORMS.get(rest, (rest,))]
    if of_expert:
        expert, tail = int(of_expert[1]), of_expert[2]
        found = [
            Key(f"mlp.experts.experts.{tail}", (expert,), (experts,)),
            Key(f"mlp.experts.experts.{expert}.{tail}", (), ()),
        ]
    stacked = [Key(f"decoder.layers.{key.name}", (layer, *key.index), (layers, *key.stacked)) for key in found]
    return stacked + [Key(f"decoder.layers.{layer}.{key.name}", key.index, key.stacked) for key in found]
