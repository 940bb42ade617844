"""`headwater bench`: measure against a peer in one run, and report ratios."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headwater.errors import UserError


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
    step.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when both sides ran all steps."""
    from rich.console import Console

    from headwater.bench.step import compare, table
    from headwater.cli.train import split_words

    recipe, overrides = split_words(args.words)
    console = Console()
    if args.json is not None:
        try:
            args.json.touch()  # before the run, so that a wrong path costs nothing
        except OSError as error:
            raise UserError(f"--json {args.json}: {error.strerror}") from error
    result = compare(recipe, overrides, steps=args.steps, warmup=args.warmup, console=console)
    if args.json is not None:
        args.json.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    console.print(table(result))
    return 0
