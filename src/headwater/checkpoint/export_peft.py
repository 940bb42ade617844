"""Adapters of a checkpoint: as a folder for PEFT, and merged into the model that they were trained beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from headwater.bridge.folder import OpenFolder
from headwater.checkpoint.adapters import A, B, adapted_matrices, factor, recorded_config, recorded_peft
from headwater.checkpoint.digest import digest, digest_bytes
from headwater.checkpoint.dtypes import DTYPES, dtype_name
from headwater.checkpoint.export import new_output, stored_bytes
from headwater.checkpoint.reader import Checkpoint, ComponentReader
from headwater.checkpoint.weight_files import Weight
from headwater.errors import UserError

_PREFIX = "base_model.model."
_HEAD = "lm_head.weight"
_NOT_WEIGHTS = ".rotary_emb.inv_freq"


def export_peft(checkpoint: Checkpoint, component: str, output: Path, base: str | None = None) -> int:
    """Write a component's adapters as a folder for `peft.PeftModel.from_pretrained`; returns the number of tensors.

    base: what the folder calls its base model; None is the run's model_name.
    Raises UserError where there are no adapters, the checkpoint is corrupt, or `new_output` does.
    """
    reader = checkpoint.component(component)
    matrices = adapted_matrices(reader)
    if not matrices:
        raise UserError(f"{checkpoint.folder}: {component} has no adapters: --to peft is for runs with peft.enabled")
    base = base or recorded_config(checkpoint, component).get("model_name")
    if not isinstance(base, str):
        raise UserError(f"{checkpoint.folder} has no config.yaml that names its model: give --model MODEL")
    alpha = _alpha(checkpoint, component)
    names = [factor(matrix, ending) for matrix in matrices for ending in (A, B)]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": reader.boxes(names[0])[0].global_shape[0],
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": sorted({matrix.split(".")[-2] for matrix in matrices}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_output(output, checkpoint.folder, stored_bytes(reader, names)) as folder:
        tensors = {_PREFIX + name: reader.read(name) for name in names}
        described = folder / "adapter_config.json"
        described.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        file = folder / "adapter_model.safetensors"
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"{output}: cannot be written: {' '.join(str(error).split())}") from error
        # safetensors makes files that nobody else can read.
        file.chmod(described.stat().st_mode & 0o777)
    return len(names)


class MergedWeights:
    """The tensors of a base model's folder, adapters added to them: in fp32, then in the dtype that was trained in.

    Raises UserError where an adapter's matrix is not there, or of another shape.
    """

    def __init__(self, checkpoint: Checkpoint, component: str, model: Path, opened: OpenFolder) -> None:
        self._reader: ComponentReader = checkpoint.component(component)
        self._opened = opened
        self._model, self._folder = model, checkpoint.folder
        self._adapted = set(adapted_matrices(self._reader))
        self._digests: dict[str, str] = {}
        self._base = _base_digest(checkpoint, component)
        for matrix in sorted(self._adapted):
            sizes = (self._boxes(matrix, B)[0], self._boxes(matrix, A)[1])
            if matrix not in opened.names or opened.shape(matrix) != sizes:
                raise UserError(f"{self._folder} has an adapter of {matrix} {sizes}, which {model} does not hold")
        first = next(iter(sorted(self._adapted)))
        self.dtype = DTYPES[self._reader.boxes(factor(first, A))[0].dtype]
        self._scale = _alpha(checkpoint, component) / self._boxes(first, A)[0]

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return self._opened.names

    def weight(self, name: str) -> Weight:
        """Of a tensor, as `read` gives it."""
        return Weight(dtype_name(self.dtype), self._opened.shape(name))

    def read(self, name: str) -> torch.Tensor:
        """A tensor, merged."""
        weight = self._opened.whole(name).to(self.dtype)
        if not name.endswith(_NOT_WEIGHTS):
            self._digests[name] = f"{name} {digest(weight):016x}"
        if name not in self._adapted:
            return weight
        a, b = (self._reader.read(factor(name, ending)).float() for ending in (A, B))
        return (weight.float() + self._scale * (b @ a)).to(self.dtype)

    def require_the_base(self) -> None:
        """Once all were read: raise UserError where they are not the weights that the run began with."""
        tied = {name: line for name, line in self._digests.items() if name != _HEAD}  # stored, but not a weight
        if self._base is not None and self._base not in {_digest(self._digests), _digest(tied)}:
            raise UserError(
                f"{self._model} does not hold the weights that {self._folder} was trained from: give --model its own"
            )

    def _boxes(self, matrix: str, ending: str) -> tuple[int, ...]:
        return self._reader.boxes(factor(matrix, ending))[0].global_shape


def _alpha(checkpoint: Checkpoint, component: str) -> float:
    peft = recorded_peft(checkpoint, component)
    try:
        return float((peft or {})["alpha"])
    except (LookupError, TypeError, ValueError):
        raise UserError(
            f"{checkpoint.folder} has no config.yaml with {component}.megatron_cfg.peft.alpha, by which adapters count"
        ) from None


def _base_digest(checkpoint: Checkpoint, component: str) -> str | None:
    """As the trainer took it over the names and the weights that it began with; None where it did not say."""
    found = checkpoint.trainer_state().get({"policy": "base_model", "value": "value_base_model"}.get(component, ""))
    return found if isinstance(found, str) and found else None


def _digest(lines: dict[str, str]) -> str:
    return f"{digest_bytes(' '.join(sorted(lines.values())).encode()):016x}"
