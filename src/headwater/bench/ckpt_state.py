"""The training that the checkpoint benchmark saves: a language model with AdamW, and what its state dict holds."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

State = dict[str, Any]
_VOCABULARY = 1024
_TOKENS = 64
_BYTES_PER_PARAMETER = 12  # fp32 weight and AdamW's two moments


def synchronize(device: torch.device) -> None:
    """Wait for what was asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def named_tensors(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nested state dict with their paths."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from named_tensors(value, f"{path}/{key}")


def state_bytes(state: State) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(state))


def empty_copy(value: Any) -> Any:
    """The same structure with new tensors on the CPU, which hold NaN until they are filled."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, float("nan"), device="cpu")
    if isinstance(value, dict):
        return {key: empty_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(empty_copy, value))
    return value


def fingerprints(state: State) -> dict[str, str]:
    """SHA-256 of each tensor's bytes, by path: independent of the digests that checkpoints carry."""
    found = {}
    for path, tensor in named_tensors(state):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found[path] = hashlib.sha256(data.numpy().data).hexdigest()
    return found


class Training:
    """A transformer language model on random tokens with AdamW, all in fp32.

    size: bytes that weights and moments take, about; `nbytes` says how many it became. The state dict refers to the
    live tensors, which every step changes in place; one dict serves all saves.
    """

    def __init__(self, size: float, device: torch.device) -> None:
        torch.manual_seed(0)
        parameters = size / _BYTES_PER_PARAMETER
        width = 64 * max(1, round((parameters / 120) ** 0.5 / 64))  # a layer has 12 * width**2 parameters: about ten
        layers = max(1, round((parameters - 2 * _VOCABULARY * width) / (12 * width**2)))
        with torch.device(device):
            layer = nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            self.model = nn.Sequential(
                nn.Embedding(_VOCABULARY, width),
                nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
                nn.Linear(width, _VOCABULARY),
            )
            self._tokens = torch.randint(_VOCABULARY, (4, _TOKENS + 1))
        self.device = device
        self.microbatches = 1
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.accumulate()
        self.update()
        self.state: State = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        self.nbytes = state_bytes(self.state)

    def accumulate(self) -> None:
        """Forward and backward of every micro-batch; changes gradients alone."""
        for _ in range(self.microbatches):
            logits = self.model(self._tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten()).backward()

    def update(self) -> None:
        """Change the weights and moments, in place."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def calibrate(self, seconds: float) -> float:
        """Choose micro-batches so that a step takes longer than `seconds`; returns the seconds that it takes."""
        self.microbatches = 1
        self._timed_step()
        update, one = min(self._timed_step() for _ in range(2))
        self.microbatches = max(1, -int(-(seconds - update) // one))
        while (step := sum(self._timed_step())) <= seconds:
            self.microbatches += max(1, self.microbatches // 8)
        return step

    def _timed_step(self) -> tuple[float, float]:
        """Seconds of the update and of the forward and backward passes."""
        synchronize(self.device)
        started = time.perf_counter()
        self.accumulate()
        synchronize(self.device)
        changed = time.perf_counter()
        self.update()
        synchronize(self.device)
        return time.perf_counter() - changed, changed - started
