"""Which weights a model has, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headwater.errors import UserError
from headwater.models.quiet import quiet_transformers
from headwater.models.resolve import one_line


@dataclass(frozen=True)
class WeightShapes:
    """all: shape of each entry of the model's state dict. required: those left if each tied weight counts once."""

    all: dict[str, tuple[int, ...]]
    required: tuple[str, ...]


def weight_shapes(path: Path) -> WeightShapes:
    """The weights of the causal language model that config.json in `path` describes; allocates none of them.

    No code that ships with a model is run. Raises UserError where transformers cannot build the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with quiet_transformers(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
    except Exception as error:
        raise UserError(f"cannot build the model of {path}: {type(error).__name__}: {one_line(error)}") from error
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    return WeightShapes(
        all={name: tuple(tensor.shape) for name, tensor in state.items()},
        required=tuple(name for name, tensor in state.items() if first[id(tensor)] == name),
    )
