"""The `headwater` command: reads the command line, runs one command, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from headwater import __version__
from headwater.cli import bench, ckpt, functional, metrics, models, train
from headwater.errors import HeadwaterError, UserError

_COMMANDS = (train, functional, ckpt, metrics, models, bench)
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Exit codes: 0 holds, 1 does not hold, 2 cannot tell or bad input, 3 blocked by the environment, 130 or
    143 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Wherever it stands: whoever adds it to a command that failed adds it at the end.
    debug = "--debug" in words
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        args = _parse([word for word in words if word != "--debug"])
        return args.run(args)
    except HeadwaterError as error:
        if debug:
            raise
        print(f"headwater: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("headwater: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def _parse(words: list[str]) -> argparse.Namespace:
    """argparse stops taking overrides at the first option behind them; those left over are taken here."""
    args, rest = _parser().parse_known_args(words)
    if rest:
        if not hasattr(args, "words") or any(word.startswith("-") for word in rest):
            raise UserError(f"unrecognized arguments: {' '.join(rest)} (see headwater --help)")
        args.words += rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="headwater", description="Reinforcement-learning post-training with proven checkpoints.")
    parser.add_argument("--version", action="version", version=f"headwater {__version__}")
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks and debug messages (anywhere on the line)"
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
