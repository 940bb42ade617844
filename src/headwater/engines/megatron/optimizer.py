"""Megatron's AdamW over fp32 master weights, with the schedule and the errors of the torch backend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from headwater.config.schema import EngineConfig
from headwater.engines.megatron.model import MegatronModel
from headwater.engines.torch.schedule import learning_rate_factor
from headwater.errors import HeadwaterError


class MegatronAdam:
    """chunks: wrapped for data parallelism. group: of the configuration, as messages name it."""

    def __init__(self, model: MegatronModel, chunks: Sequence[Any], config: EngineConfig, group: str) -> None:
        self._config = config
        self._group = group
        optimizer = config.optimizer
        dtype = model.config.params_dtype
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
            raise HeadwaterError(
                f"the gradient norm is {norm} at optimizer step {self.steps + 1}: nothing was applied; lower "
                f"{self._group}.optimizer.lr or look for a reward or loss that grows without bound"
            )
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
        for one in getattr(self._megatron, "chained_optimizers", [self._megatron]):
            found = self._held(one, parameter)
            if found is not None:
                begin, end, main = found
                states = dict(one.optimizer.state.get(main, {}))
                if parameter.dtype != torch.float32:
                    states["param"] = main
                return begin, end, states
        return 0, 0, {}

    def prepare_state(self, parameter: torch.nn.Parameter, exists: bool) -> None:
        """Give a parameter moments that are ready to be filled, or none."""
        for one in getattr(self._megatron, "chained_optimizers", [self._megatron]):
            found = self._held(one, parameter)
            if found is None:
                continue
            main = found[2]
            one.optimizer.state.pop(main, None)
            if exists:
                one.optimizer.state[main] = {
                    # Of its own for each parameter: torch's AdamW counts it up once for each.
                    "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                    "exp_avg": torch.zeros_like(main),
                    "exp_avg_sq": torch.zeros_like(main),
                }

    def _held(self, one: Any, parameter: torch.nn.Parameter) -> tuple[int, int, torch.Tensor] | None:
        """Range and master weight that one of Megatron's optimizers has of a parameter."""
        if not self.is_distributed:
            main = getattr(parameter, "main_param", parameter)
            known = {id(other) for group in one.optimizer.param_groups for other in group["params"]}
            return (0, parameter.numel(), main) if id(main) in known else None
        if parameter not in one.model_param_group_index_map:
            return None
        held = one._get_model_param_range_map(parameter)["param"]
        # Not by Megatron's index of the parameter in its group, which is wrong where a group has two dtypes.
        pairs = (
            (one.model_float16_groups, one.shard_fp32_from_float16_groups),
            (one.model_fp32_groups, one.shard_fp32_groups),
        )
        for models, mains in pairs:
            for of_models, of_mains in zip(models, mains, strict=True):
                for model, main in zip(of_models, of_mains, strict=True):
                    if model is parameter:
                        return held.start, held.end, main
        return None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Masters, moments and steps."""
        for one in getattr(self._megatron, "chained_optimizers", [self._megatron]):
            for group in one.optimizer.param_groups:
                yield from group["params"]
            for state in one.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
