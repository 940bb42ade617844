"""The `headwater` command: reads the command line, runs one command, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from headwater import __version__
from headwater.cli import bench, ckpt, metrics, models, train
from headwater.errors import HeadwaterError

_COMMANDS = (train, ckpt, metrics, models, bench)
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Exit codes: 0 holds, 1 does not hold, 2 cannot tell or bad input, 3 blocked by the environment, 130 or
    143 interrupted.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if args.debug else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        return args.run(args)
    except HeadwaterError as error:
        if args.debug:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headwater", description=__doc__)
    parser.add_argument("--version", action="version", version=f"headwater {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
