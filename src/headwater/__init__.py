"""Reinforcement-learning post-training in which every checkpoint and weight sync is proven fresh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.checkpoint.standalone import AsyncCheckpointer

__version__ = "0.1.0"
__all__ = ["AsyncCheckpointer", "__version__"]


def __getattr__(name: str) -> Any:
    # On demand: the checkpoint writer is a process that imports this package and must stay without torch.
    if name == "AsyncCheckpointer":
        from headwater.checkpoint.standalone import AsyncCheckpointer

        return AsyncCheckpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
