"""A family of models: how its configuration and its parameters are named in Hugging Face and in Megatron."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.bridge.pieces import Copied, Dimensions, Piece, Place, Rule, Slot, fill
from headwater.checkpoint.write_request import listed
from headwater.errors import UserError


@dataclass(frozen=True)
class Family:
    """model_types: of `config.json`. rules: of every parameter. settings: arguments of Megatron's TransformerConfig
    beyond those that all families share, from a transformers configuration. dimensions: further sizes.
    """

    name: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    settings: Callable[[Any], dict[str, Any]] = lambda _: {}
    dimensions: Callable[[Any], dict[str, int]] = lambda _: {}

    def dims(self, config: Any) -> Dimensions:
        """Sizes of a model. config: its transformers configuration."""
        return Dimensions(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            query_groups=config.num_key_value_heads,
            head_size=head_size(config),
            vocabulary=config.vocab_size,
            feed_forward=config.intermediate_size,
            **self.dimensions(config),
        )


def head_size(config: Any) -> int:
    """Width of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class ParameterMap:
    """A family's rules for one model at one place.

    Raises UserError where a parameter has no rule.
    """

    def __init__(self, family: Family, dims: Dimensions, place: Place) -> None:
        self._family = family
        self._dims = dims
        self._place = place
        self._rules = [(_pattern(rule.megatron), rule) for rule in family.rules]

    def pieces(self, parameter: str) -> list[Piece]:
        """Of a parameter by its Megatron name, in which layers and experts are numbered over the whole model."""
        rule, numbers = self._find(parameter)
        return rule.pieces(fill(rule.hugging_face, numbers), self._slot(numbers), self._dims)

    def is_cut(self, parameter: str) -> bool:
        """Whether tensor-parallel ranks hold different parts of a parameter."""
        return not isinstance(self._find(parameter)[0], Copied)

    def _find(self, parameter: str) -> tuple[Rule, dict[str, int]]:
        for pattern, rule in self._rules:
            if match := pattern.fullmatch(parameter):
                return rule, {key: int(value) for key, value in match.groupdict().items()}
        raise UserError(
            f"the bridge for {self._family.name} has no rule for Megatron's parameter {parameter}: "
            "add one, see docs/add-a-model-family.md"
        )

    def _slot(self, numbers: Mapping[str, int]) -> Slot:
        return self._place.expert_tensor if "expert" in numbers else self._place.tensor

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise UserError where a parameter of this rank has no rule, or another shape than its rule gives."""
        wrong = []
        for parameter, shape in shapes.items():
            for piece in self.pieces(parameter):
                if piece.shape[1:] != tuple(shape[1:]) or piece.rows.stop > shape[0]:
                    wrong.append(f"{parameter} is {tuple(shape)}, of which {piece.name} is {piece.shape}")
        if wrong:
            raise UserError(f"the bridge for {self._family.name} does not fit: {listed(wrong)}")


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", escaped))
