"""Low-rank adapters in the coordinates of Hugging Face: one pair of factors for each of its matrices.

A matrix W [out, in] is adapted by B A, A [rank, in] and B [out, rank] (Hu et al., 2021, arXiv:2106.09685). A Megatron
matrix that stacks several of Hugging Face's has an A for each, and one B with its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwater.bridge.family import Family
from headwater.bridge.pieces import Copied, Dimensions, Output, Piece, Rule, Slot
from headwater.checkpoint.adapters import WEIGHT, A, B, factor


@dataclass(frozen=True)
class Narrowed:
    """The factor that is cut as its matrix is: `matrix` with the rank in place of the hidden size."""

    megatron: str
    matrix: Rule
    ending: str
    rank: int

    @property
    def hugging_face(self) -> Sequence[str]:
        return [factor(name, self.ending) for name in self.matrix.hugging_face]

    def pieces(self, names: Sequence[str], slot: Slot, dims: Dimensions) -> list[Piece]:
        return self.matrix.pieces(names, slot, replace(dims, hidden=self.rank))


def with_adapters(family: Family, targets: Sequence[str], rank: int) -> Family:
    """The same family, with rules for the adapters of its matrices. targets: Megatron's names of modules."""
    adapted = [rule for rule in family.rules if rule.megatron.removesuffix(WEIGHT).rpartition(".")[2] in targets]
    matrices = [rule for rule in adapted if rule.megatron.endswith(WEIGHT)]
    return replace(family, rules=(*family.rules, *(rule for matrix in matrices for rule in _rules(matrix, rank))))


def _rules(matrix: Rule, rank: int) -> list[Rule]:
    adapter = f"{matrix.megatron.removesuffix(WEIGHT)}.adapter."
    if isinstance(matrix, Output):
        (name,) = matrix.hugging_face
        return [
            Narrowed(f"{adapter}lora_A.0", matrix, A, rank),
            Copied(f"{adapter}lora_B", factor(name, B), ("hidden", rank)),
        ]
    copied = [
        Copied(f"{adapter}lora_A.{index}", factor(name, A), (rank, "hidden"))
        for index, name in enumerate(matrix.hugging_face)
    ]
    return [*copied, Narrowed(f"{adapter}lora_B", matrix, B, rank)]
