"""LoRA on Megatron's linear layers (Hu et al., 2021, arXiv:2106.09685), cut over tensor-parallel ranks as they are.

Convention of Megatron: hidden states are [S, B, H], S the positions that this rank has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from headwater.bridge.family import ParameterMap
from headwater.bridge.pieces import Dimensions, Piece
from headwater.checkpoint.digest import digest_bytes
from headwater.config.schema import PeftConfig
from headwater.errors import UserError

Where = Callable[[torch.Tensor], torch.Tensor]
"""From a tensor to one that holds what it holds, on the host while its storage is away."""


def _here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Adapter(torch.nn.Module):
    """What is added to the output of one linear layer: alpha / rank * B A x.

    lora_A: n matrices [rank, in], one for each Hugging Face matrix that the layer stacks. lora_B: [out, rank], each row
    for the A of its matrix. Of a layer cut by rows A is whole and B cut, of one cut by columns A is cut and B whole.
    """

    def __init__(self, linear: Any, factors: list[Piece], rows: list[Piece], peft: PeftConfig) -> None:
        """factors: one piece for each A. rows: those of B."""
        super().__init__()
        dtype = linear.weight.dtype
        self._by_rows = isinstance(linear, ColumnParallelLinear)
        self.sequence_parallel = linear.sequence_parallel  # off while tokens are generated
        self._scale = peft.alpha / peft.rank
        self.lora_A = torch.nn.ParameterList(torch.nn.Parameter(_initial(piece).to(dtype)) for piece in factors)
        self.lora_B = torch.nn.Parameter(torch.zeros(len(linear.weight), peft.rank, dtype=dtype, device="cpu"))
        for parameter in self.lora_A if self._by_rows else [self.lora_B]:
            # Each rank sees a part of the positions, and Megatron adds up the gradients of weights that say so.
            parameter.sequence_parallel = self.sequence_parallel
        which = list(dict.fromkeys(piece.name for piece in rows))
        owners = torch.zeros(len(linear.weight), len(factors), dtype=dtype, device="cpu")
        for piece in rows:
            owners[piece.rows, which.index(piece.name)] = 1
        self.register_buffer("_owners", owners, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[S, B, in] to [S, B, out], as the layer takes and gives them."""
        narrow = F.linear(inputs, self._a())
        if self._by_rows and self.sequence_parallel:
            narrow = gather_from_sequence_parallel_region(narrow)
        elif self._by_rows:
            narrow = copy_to_tensor_model_parallel_region(narrow)
        elif self.sequence_parallel:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow)
        return F.linear(narrow, self._b()) * self._scale

    def merged(self, weight: torch.Tensor, rows: slice, where: Where) -> torch.Tensor:
        """Rows of the layer's weight with the adapter in them, computed in fp32, in the dtype of the weight.

        where: of a parameter of the adapter, which is away where the weight is.
        """
        change = self._scale * (self._b(where)[rows].float() @ self._a(where).float())
        # A weight that nothing is added to keeps its bits, -0.0 included: its digest is that of the base model.
        return torch.where(change == 0, weight[rows], (weight[rows].float() + change).to(weight.dtype))

    def _a(self, where: Where = _here) -> torch.Tensor:
        """[n * rank, in]"""
        return torch.cat([where(one) for one in self.lora_A])

    def _b(self, where: Where = _here) -> torch.Tensor:
        """[out, n * rank]: in each row its B at the place of its A, and zeros at the others."""
        b = where(self.lora_B)
        return (self._owners.to(b.device)[:, :, None] * b[:, None]).flatten(1)


def check_targets(dims: Dimensions, peft: PeftConfig, group: str) -> None:
    """Raise UserError, naming the key, where a model has target modules that cannot be adapted."""
    of_experts = [target for target in peft.target_modules if target.startswith("linear_fc")]
    if peft.enabled and dims.experts and of_experts:
        raise UserError(
            f"{group}.megatron_cfg.peft.target_modules: {' and '.join(of_experts)} of experts cannot be adapted; for a "
            "model with experts set it to [linear_qkv,linear_proj]"
        )


def add_adapters(chunk: Any, name_of: Callable[[str], str], parameter_map: ParameterMap, peft: PeftConfig) -> None:
    """Give a chunk's target modules adapters. name_of: from a parameter's name in the chunk to that over all ranks."""
    for name, linear in list(chunk.named_modules()):
        if name.rpartition(".")[2] not in peft.target_modules:
            continue
        adapter = name_of(f"{name}.adapter.")
        rows = parameter_map.pieces(f"{adapter}lora_B")
        count = len({piece.name for piece in rows})
        factors = [piece for index in range(count) for piece in parameter_map.pieces(f"{adapter}lora_A.{index}")]
        linear.adapter = Adapter(linear, factors, rows, peft)
        linear.register_forward_hook(_add)


def _add(linear: Any, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return output[0] + linear.adapter(args[0]), output[1]


def _initial(piece: Piece) -> torch.Tensor:
    """This rank's box of an A, fp32: the same numbers at any layout, distributed as PEFT's."""
    generator = torch.Generator("cpu").manual_seed(digest_bytes(piece.name.encode()) % 2**63)
    bound = 1 / math.sqrt(piece.global_shape[1])
    whole = torch.empty(piece.global_shape, device="cpu").uniform_(-bound, bound, generator=generator)
    return whole[piece.index].contiguous()
