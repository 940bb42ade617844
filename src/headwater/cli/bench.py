"""`headwater bench`: measure against a peer in one run, and report ratios."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from headwater.errors import UserError

_CKPT_PEERS = ("torch-save", "dcp-thread", "dcp-process", "torch-checkpointing", "nvrx")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `bench` to the command line."""
    parser = subparsers.add_parser("bench", help="measure against a peer, in turns in one run")
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    step = commands.add_parser(
        "step",
        help="a GRPO step here and in a peer",
        description="Time GRPO steps with the same model, prompts, group size, token budget and sampling, in turns.",
    )
    step.add_argument("words", nargs="*", metavar="RECIPE | KEY=VALUE", help="recipe (default: grpo) and overrides")
    step.add_argument("--peer", choices=["trl"], required=True, help="what to compare with")
    step.add_argument("--steps", type=int, default=8, help="counted steps of each side (default: 8)")
    step.add_argument("--warmup", type=int, default=1, help="steps of each side that are not counted (default: 1)")
    step.add_argument("--json", type=Path, help="write every step's figures to this file")
    step.set_defaults(run=run_step)
    ckpt = commands.add_parser(
        "ckpt",
        help="saving a checkpoint here and in peers, while a model trains",
        description=(
            "Time the call, the fence, whole training steps and the synced commit, and check what was written. "
            f"Peers: {', '.join(_CKPT_PEERS)}; one that is not installed is named in the table."
        ),
    )
    ckpt.add_argument("--size-gb", type=float, default=1.0, help="weights and moments in GB, about (default: 1)")
    ckpt.add_argument("--rounds", type=int, default=3, help="turns of each side (default: 3)")
    ckpt.add_argument("--steps", type=int, default=3, help="steps with and without saves in a turn (default: 3)")
    ckpt.add_argument(
        "--peer",
        choices=_CKPT_PEERS,
        action="append",
        metavar="NAME",
        help="what to compare with; give it again for more (default: all)",
    )
    ckpt.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="where to write, on the disk to measure (default: the current folder)",
    )
    ckpt.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the model trains (default: cpu)")
    ckpt.add_argument("--json", type=Path, help="write every sample to this file")
    ckpt.set_defaults(run=run_ckpt)


def run_step(args: argparse.Namespace) -> int:
    """Exit code 0 when both sides ran all steps."""
    from rich.console import Console

    from headwater.bench.step import compare, table
    from headwater.cli.train import split_words

    recipe, overrides = split_words(args.words)
    console = Console()
    _require_writable(args.json)
    result = compare(recipe, overrides, steps=args.steps, warmup=args.warmup, console=console)
    _write(args.json, result.to_json())
    console.print(table(result))
    return 0


def run_ckpt(args: argparse.Namespace) -> int:
    """Exit code 0 when Headwater ran to the end and its checkpoint held the right values, whatever the peers did."""
    from rich.console import Console

    from headwater.bench.ckpt import Options, compare
    from headwater.bench.ckpt_table import table

    console = Console(width=max(Console().width, 150))  # lines that wrap are better than figures cut off
    options = Options(
        size=args.size_gb * 1e9,
        rounds=args.rounds,
        steps=args.steps,
        peers=list(dict.fromkeys(args.peer or _CKPT_PEERS)),
        folder=args.folder,
        device=args.device,
    )
    options.check()
    _require_writable(args.json)
    result = compare(options, console)
    _write(args.json, result.to_json())
    console.print(table(result))
    return 0 if result.sides[0].right else 1


def _require_writable(path: Path | None) -> None:
    """Before the run, so that a wrong path costs nothing."""
    if path is not None:
        try:
            path.touch()
        except OSError as error:
            raise UserError(f"--json {path}: {error.strerror}") from error


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
