"""`headwater functional`: run one named job end to end and say whether it did what it should."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from headwater.errors import UserError


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `functional` to the command line."""
    from headwater.functional.jobs import JOBS

    jobs = "\n".join(f"  {name:26}{job.what}" for name, job in JOBS.items())
    parser = subparsers.add_parser(
        "functional",
        help="run a small named job and check what it did",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Run a small named job, write run.log and metrics.json, and check them.\n\njobs:\n{jobs}",
    )
    parser.add_argument("words", nargs="*", metavar="NAME | KEY=VALUE", help="the job, then overrides of its recipe")
    parser.add_argument(
        "--output", metavar="DIR", help="folder of its files (default: runs/functional/NAME), of which old ones go"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if all holds, 1 if something does not, 2 if one cannot tell; the training's own where it failed."""
    from headwater.cli.train import require_overrides
    from headwater.functional.jobs import JOBS, find_job
    from headwater.functional.run import run_job

    if not args.words or "=" in args.words[0]:
        raise UserError(f"name a job first: {', '.join(JOBS)}")
    name, *overrides = args.words
    job = find_job(name)
    require_overrides(overrides, "job")
    folder = Path(args.output) if args.output else Path("runs") / "functional" / name
    return run_job(job, overrides, folder.expanduser(), partial(print, flush=True))
