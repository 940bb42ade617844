"""Adapters (LoRA) in a checkpoint: what of its tensors they are, and how the run that trained them was set."""

from __future__ import annotations

from typing import Any

import yaml

from headwater.checkpoint.reader import Checkpoint, ComponentReader
from headwater.errors import UserError

WEIGHT, A, B = ".weight", ".lora_A.weight", ".lora_B.weight"
"""What the names of a matrix and of its two factors end in."""
_OPTIMIZER = "optimizer."


def adapted_matrices(reader: ComponentReader) -> list[str]:
    """Names of the matrices that have adapters, sorted; none where whole weights were trained.

    Raises UserError where other weights are stored beside adapters.
    """
    weights = [name for name in reader.names() if not name.startswith(_OPTIMIZER)]
    matrices = sorted(name.removesuffix(B) + WEIGHT for name in weights if name.endswith(B))
    others = sorted(set(weights) - {factor(name, ending) for name in matrices for ending in (A, B)})
    if matrices and others:
        raise UserError(f"{others[0]} was trained beside adapters: only a language model's adapters can be exported")
    return matrices


def factor(matrix: str, ending: str) -> str:
    """Name of a matrix's factor. ending: `A` or `B`."""
    return matrix.removesuffix(WEIGHT) + ending


def recorded_config(checkpoint: Checkpoint, component: str) -> dict[str, Any]:
    """The component's group of the run's configuration; empty where none is recorded."""
    entry = next((file for file in checkpoint.manifest.files if file.path == "config.yaml"), None)
    if entry is None:
        return {}
    try:
        section = yaml.safe_load(checkpoint.read_file(entry))[component]
    except (yaml.YAMLError, LookupError, TypeError):
        return {}
    return section if isinstance(section, dict) else {}


def recorded_peft(checkpoint: Checkpoint, component: str) -> dict[str, Any] | None:
    """Settings (rank, alpha, target_modules) of the adapters that the run trained; None where it trained none."""
    megatron = recorded_config(checkpoint, component).get("megatron_cfg")
    peft = megatron.get("peft") if isinstance(megatron, dict) else None
    return peft if isinstance(peft, dict) and peft.get("enabled") is True else None
