"""Megatron's AdamW over fp32 master weights, with the schedule and the errors of the torch backend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import optimizer as of_megatron
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from headwater.config.schema import EngineConfig
from headwater.engines.megatron.model import MegatronModel
from headwater.engines.torch.optimizer import not_finite
from headwater.engines.torch.schedule import learning_rate_factor


class MegatronAdam:
    """chunks: wrapped for data parallelism. group: of the configuration, as messages name it."""

    def __init__(self, model: MegatronModel, chunks: Sequence[Any], config: EngineConfig, group: str) -> None:
        self._model = model
        self._config = config
        self._group = group
        optimizer = config.optimizer
        dtype = model.config.params_dtype
        # Adam of Transformer Engine or Apex has one step for all parameters; a checkpoint holds each one's.
        of_megatron.USING_PYTORCH_OPTIMIZER = True
        self._megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optimizer.lr,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.betas[0],
                adam_beta2=optimizer.betas[1],
                adam_eps=optimizer.eps,
                clip_grad=config.max_grad_norm or 0.0,
                use_distributed_optimizer=config.megatron_cfg.use_distributed_optimizer,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
            ),
            list(chunks),
        )
        self._optimizers: list[Any] = getattr(self._megatron, "chained_optimizers", [self._megatron])
        self._masters = {
            id(parameter): (one, master) for one in self._optimizers for parameter, master in self._pairs(one)
        }
        self.steps = 0

    def step(self) -> tuple[float, float]:
        """Clip to the global L2 norm and update masters and model. Returns (norm before clipping, lr).

        Raises HeadwaterError, with weights and state untouched, where the norm is not finite.
        """
        lr = self._config.optimizer.lr * learning_rate_factor(self._config.scheduler, self.steps)
        for group in self._megatron.param_groups:
            group["lr"] = lr
        self._megatron.prepare_grads()
        norm = float(self._megatron.get_grad_norm())
        if not math.isfinite(norm):
            self.zero_grad()
            raise not_finite(norm, self.steps + 1, self._group)
        done, _, _ = self._megatron.step()
        assert done, "Megatron refused a step whose gradients are finite"
        self.steps += 1
        self.zero_grad()
        return norm, lr

    def zero_grad(self) -> None:
        """Forget the gradients accumulated so far."""
        self._megatron.zero_grad()

    @property
    def is_distributed(self) -> bool:
        """Whether ranks of one data-parallel group hold the state of different elements."""
        return self._config.megatron_cfg.use_distributed_optimizer

    def shard(self, parameter: torch.nn.Parameter) -> tuple[int, int, dict[str, torch.Tensor]]:
        """What this rank holds of a parameter's state: of its elements from `begin` to `end`, row by row.

        Flat tensors exp_avg and exp_avg_sq once a step was taken, a scalar step, and param where the model is not fp32.
        """
        if id(parameter) not in self._masters:
            return 0, 0, {}
        one, master = self._masters[id(parameter)]
        states = dict(one.optimizer.state.get(master, {}))
        if parameter.dtype != torch.float32:
            states["param"] = master
        if not self.is_distributed:
            return 0, parameter.numel(), states
        held = one._get_model_param_range_map(parameter)["param"]
        return held.start, held.end, states

    def prepare_state(self, parameter: torch.nn.Parameter, exists: bool) -> None:
        """Give a parameter moments that are ready to be filled, or none."""
        if id(parameter) not in self._masters:
            return
        one, master = self._masters[id(parameter)]
        one.optimizer.state.pop(master, None)
        if exists:
            one.optimizer.state[master] = {
                # Of its own for each parameter: torch's AdamW counts it up once for each.
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def _pairs(self, one: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Parameters of one of Megatron's optimizers, and what this rank has of their masters; the same for good."""
        if not self.is_distributed:
            masters = {id(master) for group in one.optimizer.param_groups for master in group["params"]}
            for mapped in self._model.parameters():
                master = getattr(mapped.parameter, "main_param", mapped.parameter)
                if id(master) in masters:
                    yield mapped.parameter, master
            return
        # Not by Megatron's index of the parameter in its group, which is wrong where a group has two dtypes.
        for groups, masters_of in (
            (one.model_float16_groups, one.shard_fp32_from_float16_groups),
            (one.model_fp32_groups, one.shard_fp32_groups),
        ):
            for parameters, of_parameters in zip(groups, masters_of, strict=True):
                yield from zip(parameters, of_parameters, strict=True)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Masters, moments and steps."""
        for one in self._optimizers:
            for group in one.optimizer.param_groups:
                yield from group["params"]
            for state in one.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
