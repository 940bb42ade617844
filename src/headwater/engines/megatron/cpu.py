"""megatron-core on the CPU: stand-ins for what it calls in `torch.cuda`.

`enable()` has to run before anything of `megatron` is imported, once a process; the collectives then run over gloo.
Nothing of Megatron is replaced but two functions that read the GPU's generator and one that takes for granted that
routed tokens are on a GPU. What changes in torch:

- memory asked for on "cuda", or on a device's number, is the host's. The functions are wrapped where they live: a
  `TorchFunctionMode` is off inside of `backward`.
- streams and events do nothing, the GPU's generator is the CPU's, memory counters say 0.
- `tensor.type()` names the GPU's type: Megatron's optimizers sort parameters by it.
- `torch.compile` is off: Megatron compiles many small functions with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_GPU_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
_enabled = False


def enable() -> None:
    """Let megatron-core run here. Raises RuntimeError where there is a GPU, which must never be bypassed."""
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_available():
        raise RuntimeError("this process has a GPU: megatron-core needs no stand-ins")
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists on it
    _replace_queries()
    _replace_streams()
    _share_the_generator()
    _redirect_memory()
    _patch_megatron()
    _enabled = True


def _returning(value: Any) -> Callable[..., Any]:
    """A function of its own each time: torch's compiler asserts that the functions it knows are distinct."""
    return lambda *_, **__: value


def _replace_queries() -> None:
    torch.cuda.current_device = _returning(_CPU)
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "_lazy_init"):
        setattr(torch.cuda, name, _returning(None))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, name, _returning(0))
    torch.cuda.memory_stats = lambda *_, **__: {}
    torch.cuda.get_device_capability = _returning((0, 0))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _returning(None))


class _Stream:
    """A stream or an event on which everything is done already."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self, *_: Any) -> None: ...

    wait = record = wait_stream = wait_event = synchronize

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def query(self) -> bool:
        return True


def _replace_streams() -> None:
    torch.cuda.Stream = torch.cuda.Event = _Stream  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.current_stream = _returning(_Stream())
    torch.cuda.default_stream = _returning(_Stream())
    torch.cuda.stream = contextlib.nullcontext  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.record_stream = _returning(None)  # pyright: ignore[reportAttributeAccessIssue]


def _share_the_generator() -> None:
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        # torch.manual_seed calls these
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # pyright: ignore[reportAttributeAccessIssue]
        module.manual_seed_all = _returning(None)


def _on_gpu(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_host(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def run(*args: Any, **options: Any) -> Any:
        if _on_gpu(options.get("device")):
            options["device"] = _CPU
        if options.get("pin_memory"):
            options["pin_memory"] = False
        return make(*args, **options)

    return run


def _redirect_memory() -> None:
    from torch.utils._device import _device_constructors

    makers = _device_constructors()  # made from the true functions and kept: torch.device("meta") goes on working
    for name in dir(torch):
        found = getattr(torch, name)
        if name in _LIKE or (callable(found) and not isinstance(found, type) and found in makers):
            setattr(torch, name, _on_host(found))
    for name in _NEW:
        setattr(torch.Tensor, name, _on_host(getattr(torch.Tensor, name)))

    true_to, true_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        # as the first argument a number is a device's, as is anything that names the GPU
        args = tuple(_CPU if index == 0 and _on_gpu(value) else value for index, value in enumerate(args))
        if _on_gpu(options.get("device")):
            options["device"] = _CPU
        return true_to(self, *args, **options)

    def type_(self: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
        if dtype is None:
            return _GPU_TYPES.get(self.dtype) or true_type(self)
        return true_type(self, dtype, **options)

    torch.Tensor.to = to  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.type = type_  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self  # pyright: ignore[reportAttributeAccessIssue]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # pyright: ignore[reportAttributeAccessIssue]


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # the true ones queue a call for when CUDA starts, for ever
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    def split_sizes(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        """The true one makes numbers only of tensors on a GPU; gloo takes numbers only."""
        return tensor.detach().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = split_sizes
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # bound by Transformer Engine only, and read without it
