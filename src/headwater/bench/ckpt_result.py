"""What one run of the checkpoint benchmark found."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from headwater.bench.ckpt_ceilings import Ceilings


@dataclass
class SideResult:
    """Samples of one side in seconds, in the order they were measured. problem: why there are none, or no more.

    stall_s, fence_s, commit_s: of a save alone: the call, the wait until tensors may change, and from the call until
        all is synced. nbytes: of its files.
    step_s, saving_step_s: whole training steps, without and with a save each. loop_stall_s, loop_fence_s: the call and
        the wait within the latter. right: whether the last checkpoint held what was live at its save; None if it was
        never looked at. wrong: tensors that differ.
    """

    key: str
    title: str
    note: str = ""
    problem: str = ""
    stall_s: list[float] = field(default_factory=list)
    fence_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)
    nbytes: int = 0
    step_s: list[float] = field(default_factory=list)
    saving_step_s: list[float] = field(default_factory=list)
    loop_stall_s: list[float] = field(default_factory=list)
    loop_fence_s: list[float] = field(default_factory=list)
    right: bool | None = None
    wrong: list[str] = field(default_factory=list)

    @property
    def interference(self) -> float:
        """Mean step with saves over mean step without, less 1."""
        return statistics.fmean(self.saving_step_s) / statistics.fmean(self.step_s) - 1


@dataclass
class Comparison:
    """nbytes: of the state. step_s: of the calibrated step. sides: Headwater first."""

    machine: str
    nbytes: int
    microbatches: int
    step_s: float
    ceilings: Ceilings
    sides: list[SideResult]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
