"""`headwater metrics`: TensorBoard files to JSON, and assertions on what a run logged."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from headwater.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Add the command to `subparsers` of the program's parser."""
    parser = subparsers.add_parser("metrics", help="dump TensorBoard files, check what a run logged")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    dump = actions.add_parser("dump", help="write all scalars of the event files below DIR as {tag: {step: value}}")
    dump.add_argument("dir", metavar="DIR", help="folder to search for TensorBoard event files")
    dump.add_argument("--output", metavar="F", required=True, help="JSON file to write; - is standard output")
    dump.set_defaults(run=run_dump)

    check = actions.add_parser(
        "check",
        help="check expressions on a dump or a metrics.jsonl",
        description="Exit code 0 if all expressions hold, 1 if one does not, 2 if one is malformed.",
    )
    check.add_argument("file", metavar="F", help="file of `headwater metrics dump`, or a metrics.jsonl")
    check.add_argument(
        "expressions", metavar="EXPR", nargs="*", help="""such as 'max(data["train/token_mult_prob_error"]) < 1.05'"""
    )
    check.set_defaults(run=run_check)


def run_dump(args: argparse.Namespace) -> int:
    """Write the scalars below `args.dir` to `args.output`. Raises UserError if either fails."""
    from headwater.metrics.dump import dump_tensorboard, encode_dump

    text = encode_dump(dump_tensorboard(args.dir))
    if args.output == "-":
        sys.stdout.write(text)
    else:
        _replace(Path(args.output), text)
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Print a verdict for each expression; the worst of them is the exit code: 2, then 1, then 0."""
    from headwater.metrics.expressions import check

    if not args.expressions:
        raise UserError("""no expression to check, such as 'max(data["train/token_mult_prob_error"]) < 1.05'""")
    data = _load(args.file)
    worst = 0
    for expression in args.expressions:
        try:
            result = check(expression, data)
            holds, reason, code = result.holds, result.reason, 0 if result.holds else 1
        except UserError as error:
            holds, reason, code = False, str(error), error.exit_code
        worst = max(worst, code)
        print(f"{'pass' if holds else 'FAIL'}  {' '.join(expression.split())}  ({reason})")
    return worst


def _load(path: str) -> dict[str, dict[str, float]]:
    from headwater.metrics.dump import read_dump, read_series

    return read_series(path) if path.endswith(".jsonl") else read_dump(path)


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old one or all of the new one."""
    try:
        if path.exists() and not path.is_file():
            # A pipe or a device is written to; it must not be replaced by a file.
            path.write_text(text)
            return
        path = path.resolve()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
