from __future__ import annotations

import pytest
import torch

from headwater.config.schema import OptimizerConfig, SchedulerConfig
from headwater.engines.torch.optimizer import MasterAdamW
from headwater.engines.torch.schedule import learning_rate_factor
from headwater.errors import HeadwaterError


def adamw(param: torch.nn.Parameter, **options) -> MasterAdamW:
    return MasterAdamW({"w": param}, OptimizerConfig(**options), SchedulerConfig())


def test_one_step_by_hand() -> None:
    param = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = adamw(param, lr=0.1, betas=(0.9, 0.95))
    (param * 3).sum().backward()
    norm, lr = optimizer.step(max_grad_norm=None)
    # The first step of Adam moves by lr against the sign of the gradient.
    assert (norm, lr) == (pytest.approx(3.0), 0.1)
    assert param.item() == pytest.approx(0.9)


def test_steps_below_the_resolution_of_bf16_add_up_in_the_master() -> None:
    param = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    optimizer = adamw(param, lr=0.001)  # bf16 has no number between 0.996 and 1
    seen = []
    for _ in range(6):
        (param * 1.0).sum().backward()
        optimizer.step(None)
        seen.append(param.item())
    assert seen[0] == 1.0
    assert seen[-1] < 1.0


def test_clipping_keeps_the_direction_and_reports_the_norm_before() -> None:
    params = {name: torch.nn.Parameter(torch.tensor([value])) for name, value in (("a", 3.0), ("b", 4.0))}
    optimizer = MasterAdamW(params, OptimizerConfig(lr=1.0), SchedulerConfig())
    sum((p**2 / 2).sum() for p in params.values()).backward()
    clipped = {}
    step = optimizer._adam.step

    def spy() -> None:
        clipped.update({name: grad.item() for name, grad in optimizer.gradients().items()})
        step()

    optimizer._adam.step = spy
    norm, _ = optimizer.step(max_grad_norm=1.0)
    assert norm == pytest.approx(5.0)
    assert clipped == {"a": pytest.approx(0.6, abs=1e-5), "b": pytest.approx(0.8, abs=1e-5)}


def test_weight_decay_spares_vectors() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    params = {"matrix": matrix, "vector": vector}
    optimizer = MasterAdamW(params, OptimizerConfig(lr=0.1, weight_decay=0.5), SchedulerConfig())
    ((matrix * 0).sum() + (vector * 0).sum()).backward()
    optimizer.step(None)
    assert matrix[0, 0].item() == pytest.approx(0.95)
    assert vector[0].item() == 1.0


def test_gradients_are_cleared_by_a_step() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = adamw(param)
    param.sum().backward()
    assert param.grad is None
    assert optimizer.gradients()["w"].tolist() == [1.0, 1.0]
    optimizer.step(None)
    assert optimizer.gradients() == {}


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.8682, 0.55, 0.2318, 0.1]),
    ],
)
def test_schedules_by_hand(name: str, factors: list[float]) -> None:
    decay = {} if name == "constant" else {"decay_steps": 4, "min_lr_ratio": 0.1}
    config = SchedulerConfig(name=name, warmup_steps=2, **decay)  # pyright: ignore[reportArgumentType]
    assert [learning_rate_factor(config, step) for step in range(7)] == pytest.approx(factors, abs=1e-4)
    assert learning_rate_factor(config, 1000) == factors[-1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(value: float) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = adamw(param)
    param.sum().backward()
    optimizer.step(None)
    before = [(chunk.name, chunk.tensor.tolist()) for chunk in optimizer.state_chunks()]
    weights = param.tolist()
    (param * value).sum().backward()
    with pytest.raises(HeadwaterError, match="optimizer step 2: nothing was applied"):
        optimizer.step(1.0)
    assert param.tolist() == weights
    assert [(chunk.name, chunk.tensor.tolist()) for chunk in optimizer.state_chunks()] == before
    assert optimizer.gradients() == {}
