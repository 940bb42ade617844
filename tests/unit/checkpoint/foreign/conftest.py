from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp


class Training:
    """A bf16 model, fp32 masters, torch's AdamW: two trained layers, a frozen one, an expert that meets no token."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict(
            {name: torch.nn.Linear(16, 16).to(dtype) for name in ("first", "second", "frozen", "expert")}
        )
        self.model["frozen"].requires_grad_(False)
        self.masters = {
            name: torch.nn.Parameter(param.detach().float().clone())
            for name, param in self.model.named_parameters()
            if param.requires_grad
        }
        self.adam = torch.optim.AdamW(self.masters.values(), lr=1e-2)

    def step(self) -> None:
        x = torch.randn(4, 16, dtype=self.model["first"].weight.dtype)
        self.model["second"](self.model["frozen"](self.model["first"](x))).square().sum().backward()
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.masters[name].grad = None if param.grad is None else param.grad.float()
                param.grad = None
        self.adam.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.model.get_parameter(name).copy_(master)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def optimizer(self) -> dict[str, dict[str, torch.Tensor]]:
        """By parameter: step, exp_avg, exp_avg_sq and master_param; the expert has a master only."""
        return {
            name: {
                **{key: value.clone() for key, value in self.adam.state.get(master, {}).items()},
                "master_param": master.detach().clone(),
            }
            for name, master in self.masters.items()
        }

    def state(self) -> dict:
        return {"model": self.weights(), "optim": {"state": self.optimizer()}, "rng": torch.get_rng_state()}


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def save_dcp(tmp_path: Path) -> Callable[..., Path]:
    """Saves a state as torch.distributed.checkpoint does, with no process group."""

    def save(name: str, state: dict, **options: Any) -> Path:
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True, **options)
        return tmp_path / name

    return save
