"""What `headwater bench ckpt` shows."""

from __future__ import annotations

import statistics

from rich.table import Table

from headwater.bench.ckpt_result import Comparison, SideResult

_COLUMNS = ("stall ms", "fence ms", "step s", "saving s", "interference", "synced s", "GB/s", "copies", "of disk")


def table(result: Comparison) -> Table:
    """Medians of each side, means for the steps; what the columns mean, and the ceilings of the run, in the caption."""
    view = Table(title=f"Checkpoint of {result.nbytes / 1e9:.2f} GB", caption=_caption(result), caption_justify="left")
    view.add_column("side", no_wrap=True)
    for column in _COLUMNS:
        view.add_column(column, justify="right", no_wrap=True)
    view.add_column("right values?")
    for side in result.sides:
        view.add_row(*_row(side, result))
    return view


def _row(side: SideResult, result: Comparison) -> list[str]:
    if not side.commit_s:
        return [side.title, *["-"] * len(_COLUMNS), side.problem]
    stall, fence, commit = map(statistics.median, (side.stall_s, side.fence_s, side.commit_s))
    memcpy, disk = statistics.median(result.ceilings.memcpy), statistics.median(result.ceilings.best_write)
    saving, step = statistics.fmean(side.saving_step_s), statistics.fmean(side.step_s)
    return [
        side.title,
        f"{stall * 1e3:.1f}",
        f"{fence * 1e3:.1f}",
        f"{step:.2f}",
        f"{saving:.2f}",
        f"{100 * side.interference:+.1f} % {saving - step:+.2f} s",
        f"{commit:.2f}",
        f"{side.nbytes / commit / 1e9:.2f}",
        f"{(stall + fence) / memcpy:.1f}",
        f"{100 * side.nbytes / commit * disk / result.nbytes:.0f} %",
        side.problem or _verdict(side),
    ]


def _verdict(side: SideResult) -> str:
    if side.right is None:
        return "not checked"
    return "yes" if side.right else f"NO: {len(side.wrong)} tensors differ"


def _caption(result: Comparison) -> str:
    ceilings = result.ceilings

    def rate(seconds: list[float]) -> str:
        return f"{ceilings.nbytes / statistics.median(seconds) / 1e9:.2f} GB/s"

    direct = f"{ceilings.direct_threads} threads O_DIRECT {rate(ceilings.direct)}" if ceilings.direct else "no O_DIRECT"
    lines = [
        f"{result.machine}; step calibrated to {result.step_s:.2f} s (micro-batches: {result.microbatches})",
        f"ceilings: memcpy {statistics.median(ceilings.memcpy) * 1e3:.0f} ms ({rate(ceilings.memcpy)}); "
        f"disk with fsync: one thread {rate(ceilings.buffered)}, {direct}",
        "stall: the call. fence: then, until tensors may change. saving: a step with a save. synced: from the call.",
        "copies: stall and fence in memcpys of the state. of disk: GB/s as a share of the faster disk ceiling.",
        *(f"{side.title}: {side.note}" for side in result.sides if side.note),
    ]
    return "\n".join(lines)
