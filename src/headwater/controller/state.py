"""What a run must remember besides tensors, as plain JSON."""

from __future__ import annotations

import base64
import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from headwater.errors import UserError


@dataclass
class TrainerState:
    """Counters of a run. All of it is at a step's boundary whenever it is read.

    step: training steps done. optim_steps, value_optim_steps: optimizer steps taken of the policy, of the value model.
    weight_version: of the newest policy.
    cursor: position in the stream of prompts. dataset: fingerprint of the training data.
    base_model: digest of the weights that the run began with, which are the reference policy's too.
    value_base_model: the same of the value model, empty without one.
    metric_history: see CheckpointManager.
    """

    dataset: str
    base_model: str
    value_base_model: str = ""
    step: int = 0
    optim_steps: int = 0
    value_optim_steps: int = 0
    weight_version: int = 0
    cursor: dict[str, int] = field(default_factory=dict)
    metric_history: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The counters with the state of every random number generator of the process."""
        return {**asdict(self), "rng": rng_state()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainerState:
        """The counters alone; `restore_rng` takes the rest. Raises UserError for a state of another form."""
        fields = {key: value for key, value in data.items() if key != "rng"}
        try:
            return cls(**fields)
        except TypeError as error:
            raise UserError(f"trainer.json of the checkpoint is not of this version: {error}") from error


def rng_state() -> dict[str, Any]:
    """States of Python's, numpy's and torch's generators, CUDA's included where it is in use."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator where `rng_state` found it. CUDA states are restored for the devices there are."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if torch.cuda.is_available():
        for device, encoded in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_decode(encoded), device)


def seed_everything(seed: int) -> None:
    """Seed the generators of a new run. Sampling does not use them; rewards and environments may."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
