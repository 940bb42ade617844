"""AdamW over fp32 master weights, whatever precision the model computes in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from headwater.checkpoint.chunk import Chunk
from headwater.config.schema import OptimizerConfig, SchedulerConfig
from headwater.engines.torch.parallel import Layout
from headwater.engines.torch.schedule import learning_rate_factor
from headwater.engines.torch.sharding import Part, local, local_gradient
from headwater.errors import HeadwaterError

STATE_PREFIX = "optimizer.state."
_ALONE = Layout()


class MasterAdamW:
    """torch's fused AdamW on fp32 masters of the parameters that require gradients.

    Gradients of all microbatches are added up in fp32, since sums in bf16 would depend on how a batch is
    cut. Where a parameter is fp32 already, it is its own master. On several ranks a master is a plain tensor, of what
    this rank holds of its parameter (the same storage where that is fp32), and gradients come by `take_gradients`.

    params: Hugging Face names and parameters; tied ones once. group: of the configuration, as messages name it. parts:
    the box of each parameter that this rank holds; None where each is whole.
    """

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        config: OptimizerConfig,
        scheduler: SchedulerConfig,
        group: str = "policy",
        layout: Layout = _ALONE,
        parts: Mapping[str, Part] | None = None,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._group = group
        self._layout = layout
        self._params = dict(params)
        self._parts = parts or {name: Part.whole(param.shape) for name, param in params.items()}
        self._masters: dict[str, torch.Tensor] = {}
        for name, param in self._params.items():
            if layout.world > 1:
                self._masters[name] = local(param).to(torch.float32).requires_grad_()
            elif param.dtype == torch.float32:
                self._masters[name] = param
            else:
                self._masters[name] = param.detach().float().requires_grad_()
                param.register_post_accumulate_grad_hook(_accumulate_into(self._masters[name]))
        filled = [master for master in self._masters.values() if master.numel()]
        decayed = [m for m in filled if m.ndim >= 2]
        plain = [m for m in filled if m.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.steps = 0

    def step(self, max_grad_norm: float | None) -> tuple[float, float]:
        """Clip to the global L2 norm, update masters and model, clear gradients. Returns (norm before clipping, lr).

        Raises HeadwaterError, with weights and state untouched, where the norm is not finite.
        """
        norm = self._grad_norm()
        if not math.isfinite(norm):
            self.zero_grad()
            raise not_finite(norm, self.steps + 1, self._group)
        self._share_storage()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), max_grad_norm, torch.tensor(norm))
        lr = self._config.lr * learning_rate_factor(self._scheduler, self.steps)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.steps += 1
        self.zero_grad()
        self.write_back()
        return norm, lr

    def take_gradients(self) -> None:
        """Add the parameters' gradients to the masters', in fp32, and clear them; after each backward pass.

        On several ranks alone: there a gradient arrives once it is summed over ranks, and hooks of a sharded
        parameter do not run.
        """
        if self._layout.world == 1:
            return
        for name, param in self._params.items():
            grad, master = local_gradient(param), self._masters[name]
            if grad is None:
                continue
            if master.grad is None:
                master.grad = grad.to(torch.float32)
            else:
                master.grad.add_(grad)
            param.grad = None

    def _grad_norm(self) -> float:
        """L2 norm of the whole gradient: each element counts on the one rank that saves it."""
        grads = [m.grad for name, m in self._masters.items() if m.grad is not None and self._parts[name].saved]
        norm = float(torch.nn.utils.get_total_norm(grads))
        if self._layout.world == 1:
            return norm
        return math.sqrt(self._layout.add(norm**2, next(iter(self._masters.values())).device))

    def _share_storage(self) -> None:
        """Let fp32 masters of several ranks be what their parameters hold today."""
        if self._layout.world > 1:
            for name, param in self._params.items():
                if param.dtype == torch.float32:
                    self._masters[name].data = local(param)

    def zero_grad(self) -> None:
        """Forget the gradients accumulated so far."""
        self._adam.zero_grad(set_to_none=True)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model's parameters."""
        for name, param in self._params.items():
            if self._has_own_storage(name):
                local(param).copy_(self._masters[name])

    def _has_own_storage(self, name: str) -> bool:
        return self._params[name].dtype != torch.float32

    def gradients(self) -> dict[str, torch.Tensor]:
        """Accumulated fp32 gradients by parameter name, of what this rank holds."""
        return {name: m.grad for name, m in self._masters.items() if m.grad is not None}

    def state_chunks(self, *, copies: bool = False) -> Iterator[Chunk]:
        """Masters (`param`, where the model is not fp32), moments and steps; what a parameter lacks is left out.

        copies: also what another rank saves, and what is empty.
        """
        for name, master in self._masters.items():
            part = self._parts[name]
            if part.saved or copies:
                if self._has_own_storage(name):
                    yield part.chunk(f"{STATE_PREFIX}param.{name}", master.detach())
                for state, value in self._adam.state.get(master, {}).items():
                    if state != "step":
                        yield part.chunk(f"{STATE_PREFIX}{state}.{name}", value)
                    elif self._layout.rank == 0 or copies:  # the first rank holds a part of every parameter
                        yield Chunk.whole(f"{STATE_PREFIX}step.{name}", value)

    def prepare_state(self, stored: set[str]) -> None:
        """Give each parameter the moments that `stored` chunk names mention, ready to be filled, and no others."""
        self._share_storage()
        for name, master in self._masters.items():
            self._adam.state.pop(master, None)
            if f"{STATE_PREFIX}exp_avg.{name}" in stored:
                self._adam.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    "exp_avg": torch.zeros_like(master, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(master, memory_format=torch.preserve_format),
                }

    def tensors(self) -> Iterator[torch.Tensor]:
        """Masters, moments and steps; not the parameters that are their own masters."""
        for name, master in self._masters.items():
            if master is not self._params[name]:
                yield master
            yield from self._adam.state.get(master, {}).values()

    def master_gradients(self) -> Iterator[torch.Tensor]:
        """Those accumulated so far, except of parameters that are their own masters."""
        return (m.grad for name, m in self._masters.items() if m is not self._params[name] and m.grad is not None)

    @torch.no_grad()
    def move(self, device: torch.device) -> None:
        """Move masters, gradients and moments; parameters that are their own masters have moved with the model."""
        self._share_storage()
        for name, master in self._masters.items():
            if self._has_own_storage(name):
                master.data = master.data.to(device)
            if master is not self._params[name] and master.grad is not None:
                master.grad = master.grad.to(device)
            state = self._adam.state.get(master, {})
            for key in state:
                state[key] = state[key].to(device)


def not_finite(norm: float, step: int, group: str) -> HeadwaterError:
    """The error to raise for a gradient norm of an optimizer step, counted from 1, that was not applied."""
    return HeadwaterError(
        f"the gradient norm is {norm} at optimizer step {step}: nothing was applied; lower "
        f"{group}.optimizer.lr or look for a reward or loss that grows without bound"
    )


def _accumulate_into(master: torch.Tensor):
    def hook(param: torch.Tensor) -> None:
        assert param.grad is not None
        if master.grad is None:
            master.grad = param.grad.float()
        else:
            master.grad.add_(param.grad)
        param.grad = None

    return hook
