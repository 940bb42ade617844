"""`headwater ckpt freshness`: is the second of two checkpoint folders newer than the first?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.checkpoint.freshness import ComponentReport, Verdict

_FOLDER_HELP = "a checkpoint folder: Headwater, torch.distributed.checkpoint, Megatron torch_dist, or safetensors"
_SHOWN = 3


def add_parser(commands: Any) -> None:
    """Add `freshness` to the commands of `ckpt`."""
    parser = commands.add_parser(
        "freshness", help="is NEW newer than OLD? exit 0 fresh, 1 stale, 2 cannot tell; any known format"
    )
    parser.add_argument("old", metavar="OLD", help=_FOLDER_HELP)
    parser.add_argument("new", metavar="NEW", help="the folder that should be newer")
    parser.add_argument("--json", action="store_true", help="print the verdict with every stale chunk as JSON")
    parser.set_defaults(run=run_freshness)


def run_freshness(args: argparse.Namespace) -> int:
    """Compare two folders: 0 if the second is newer, 1 with what repeats if it is stale, 2 if nothing can be said."""
    from headwater.checkpoint.compare import bytes_to_compare, find_repeats
    from headwater.checkpoint.foreign.folder import read_folder
    from headwater.checkpoint.freshness import judge, pair_up
    from headwater.cli.ckpt import _progress

    old, new = (read_folder(Path(path).expanduser()) for path in (args.old, args.new))
    pairs = pair_up(old, new)
    with _progress("comparing", bytes_to_compare(pairs)) as advance:
        verdict = judge(old, new, find_repeats(pairs, advance))
    if args.json:
        content = {"verdict": verdict.outcome, "old": str(old.folder), "new": str(new.folder), "old_format": old.kind}
        content |= {"new_format": new.kind, **asdict(verdict)}
        del content["outcome"]
        print(json.dumps(content, indent=1))
    else:
        print("\n".join(_lines(verdict)))
    return verdict.exit_code


def _lines(verdict: Verdict) -> list[str]:
    lines = [verdict.outcome if verdict.outcome != "cannot tell" else f"cannot tell: {verdict.reasons[0]}"]
    if verdict.outcome == "stale":
        lines += [f"  {reason}" for reason in verdict.reasons]
    lines += [f"{report.component or 'checkpoint'}: {_component(report)}" for report in verdict.components]
    return lines + [f"note: {note}" for note in verdict.notes]


def _component(report: ComponentReport) -> str:
    parts = [report.state]
    if report.old_steps and report.new_steps:
        parts.append(f"step {_range(report.old_steps)} -> {_range(report.new_steps)}")
    parts.append(f"{report.compared - report.repeated} of {report.compared} chunks changed")
    for word, names in (("idle", report.idle), ("frozen", report.frozen)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            parts.append(f"{len(names)} {word}: {', '.join(names[:_SHOWN])}{more}")
    return "; ".join(parts)


def _range(steps: tuple[float, float]) -> str:
    low, high = steps
    return f"{low:g}" if low == high else f"{low:g}..{high:g}"
