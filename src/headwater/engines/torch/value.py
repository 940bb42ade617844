"""A value model: a causal LM whose head is one linear output, trained by the engine that trains policies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from headwater.data.types import TrainSequence
from headwater.engines.torch.engine import TorchEngine

HEAD_NAME = "value_head"
_SEED = 20160608
_SCALE = 0.01


class TorchValueEngine(TorchEngine):
    """`TrainEngine` of a value model; the numbers of each completion token are values, not log-probabilities.

    A token's value is read where the policy predicts it: it is that of the state before the token.
    """

    group = "value"

    def values(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        """Value before each completion token, [C] fp32 a sequence, without gradients."""
        return self.logprobs(sequences)

    def _prepare_head(self) -> None:
        replace_head(self.model)

    def _forward(self, sequences: Sequence[TrainSequence]) -> torch.Tensor:
        """Values [T] fp32 before all completion tokens, in order."""
        return self._logits(self._packed(sequences)).float().squeeze(-1)


class ValueHead(torch.nn.Linear):
    """One fp32 output, whatever precision the rest of the model computes in.

    Its weights begin small, the same bits each time: values near zero, yet a gradient for the layers below.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(_SEED)
        with torch.no_grad():
            self.weight.normal_(0.0, _SCALE / hidden_size**0.5, generator=generator)
            torch.nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.float())


def replace_head(model: PreTrainedModel) -> None:
    """Put a `ValueHead` in the place of the language model's head, under the name `value_head`.

    The model still finds it under the old name, which stands no longer among its modules: a tied embedding stays.
    """
    head = model.get_output_embeddings()
    assert head is not None, "a causal LM has a head"
    (path,) = {name for name, module in model.named_modules() if module is head}
    parent_path, _, old_name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings.weight, torch.Tensor)
    value_head = ValueHead(embeddings.weight.shape[1])
    delattr(parent, old_name)
    parent.add_module(HEAD_NAME, value_head)
    vars(parent)[old_name] = value_head
