"""A small training run that saves every step and resumes: `python train_loop.py FOLDER STRATEGY STEPS SAVES`.

SAVES is how often each step is saved. It tells where it resumed, each step's loss with a digest of all that was
trained, and what became of saves. Its data come from a generator whose state is part of the checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manager import CheckpointManager
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError

Say = Callable[[str], object]
WIDTH = 128


class Training:
    """A regression, its AdamW and its stream of data."""

    def __init__(self) -> None:
        self.data = torch.Generator().manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
        self.tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for parameter in self.tensors.values():
            parameter.normal_(0, 0.1, generator=self.data)
        for name, parameter in self.model.named_parameters():
            self.tensors |= {f"{state}.{name}": torch.zeros_like(parameter) for state in ("exp_avg", "exp_avg_sq")}
        self.tensors["steps"] = torch.zeros((), dtype=torch.int64)

    def chunks(self) -> list[Chunk]:
        return [Chunk.whole(name, tensor) for name, tensor in self.tensors.items()]

    def digest(self) -> str:
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in self.tensors.values())).hexdigest()

    def backward(self) -> float:
        """Gradients of the next batch; returns its loss."""
        batch = torch.randn(16, WIDTH, generator=self.data)
        loss = (self.model(batch) - batch.flip(1)).square().mean()
        self.model.zero_grad()
        loss.backward()
        return loss.item()

    def step(self) -> None:
        """AdamW (Loshchilov and Hutter, 2019). torch's own takes longer to import than all of this runs."""
        self.tensors["steps"] += 1
        count = int(self.tensors["steps"])
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            first, second = self.tensors[f"exp_avg.{name}"], self.tensors[f"exp_avg_sq.{name}"]
            first.lerp_(parameter.grad, 0.1)
            second.lerp_(parameter.grad.square(), 0.01)
            update = (first / (1 - 0.9**count)) / ((second / (1 - 0.99**count)).sqrt() + 1e-8)
            self.tensors[name].mul_(1 - 1e-5).sub_(update, alpha=1e-3)


def train(folder: str, strategy: str, steps: int, saves: int, say: Say) -> None:
    """Train up to `steps` steps, from the newest checkpoint in `folder` on."""
    options: dict[str, Any] = {"checkpoint_dir": folder, "strategy": strategy, "keep_latest_k": 2}
    manager = CheckpointManager(CheckpointingConfig(**options), "run", "train_loop")
    training, fence = Training(), Fence()

    def tell() -> None:
        for note in manager.take_news().notes:
            say(note)

    try:
        done = _resume(manager, training, say)
        for step in range(done + 1, steps + 1):
            loss = training.backward()
            fence.wait()
            training.step()
            say(f"step {step} loss {loss.hex()} digest {training.digest()}")
            state = {"step": step, "data": training.data.get_state().tolist()}
            for _ in range(saves):
                manager.save(step, {"policy": training.chunks()}, state, "", None, step, [fence])
            tell()
        manager.wait_committed(120)
        tell()
    finally:
        manager.close()


def _resume(manager: CheckpointManager, training: Training, say: Say) -> int:
    newest = manager.latest()
    if newest is None:
        return 0
    say(f"resumed from {newest.folder}")
    reader = newest.component("policy")
    for chunk in training.chunks():
        reader.read_into(chunk)
    state = newest.trainer_state()
    training.data.set_state(torch.tensor(state["data"], dtype=torch.uint8))
    return state["step"]


def _main() -> int:
    folder, strategy, steps, saves = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    try:
        train(folder, strategy, int(steps), int(saves), lambda line: print(line, flush=True))  # noqa: T201
    except HeadwaterError as error:
        print(f"headwater: error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main())
