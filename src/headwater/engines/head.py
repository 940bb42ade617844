"""The output head in fp32, whatever precision the rest of the model computes in.

Logits of a bf16 head are rounded to eight significant bits, a step of 0.125 for a logit of 20, and
trainer and generator round differently. An fp32 head takes most of that disagreement away
(MiniMax-M1, arXiv:2506.13585).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class Fp32Head:
    """Makes a linear head compute `x @ weight.T + bias` in fp32 and return fp32; its parameters stay as they are.

    A generator asks for the fp32 weight at every token, so a copy is kept. Its key is the storage and the
    version that every in-place write raises, never the name: neither a step nor a move leaves an old one
    in use. `release` drops it, for an offload.

    keeps_copy: false where the weight is gathered anew for each pass, as FSDP does: it comes back in the same storage
    without raising the version.
    """

    def __init__(self, head: torch.nn.Linear, *, keeps_copy: bool = True) -> None:
        self._head = head
        self._keeps_copy = keeps_copy
        self._key: Any = None
        self._copy: torch.Tensor | None = None
        head.forward = self._forward

    def release(self) -> None:
        """Free the copy; it is made again when it is needed."""
        self._key = self._copy = None

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        head = self._head
        keeps = self._keeps_copy and not torch.is_grad_enabled()
        weight = self._converted(head.weight) if keeps else head.weight.float()
        bias = head.bias.float() if head.bias is not None else None
        return F.linear(input.float(), weight, bias)

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        if self._copy is None or key != self._key:
            self._key, self._copy = key, tensor.detach().float()
        return self._copy
