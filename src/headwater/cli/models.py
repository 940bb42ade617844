"""`headwater models`: list the built-in models, fetch one, check that a model loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import UserError

if TYPE_CHECKING:
    from headwater.models.check import ModelReport


def add_parser(subparsers: Any) -> None:
    """Add `models` and its sub-commands."""
    parser = subparsers.add_parser("models", help="list, fetch and check models")
    commands = parser.add_subparsers(dest="models_command", required=True, metavar="COMMAND")

    ls = commands.add_parser("ls", help="built-in models, and which of them are in the cache")
    ls.set_defaults(run=run_ls)

    pull = commands.add_parser("pull", help="fetch a model into the cache")
    pull.add_argument("name", metavar="NAME", help="builtin:<name>, or a hub id owner/name")
    pull.add_argument("--trust-remote-code", action="store_true", help="also fetch the code that ships with it")
    pull.set_defaults(run=run_pull)

    check = commands.add_parser("check", help="load configuration, tokenizer and weights without a network")
    check.add_argument("name", metavar="PATH|NAME", help="local folder, builtin:<name>, or a hub id in the cache")
    check.add_argument("--trust-remote-code", action="store_true", help="run the code that ships with it")
    check.set_defaults(run=run_check)


def run_ls(args: argparse.Namespace) -> int:
    """Print one line a built-in: name, size in the cache, what it is, where it is."""
    from headwater.models.builtin import BUILTINS

    for builtin in BUILTINS.values():
        size = f"{_folder_bytes(builtin.path) / 1e6:.0f} MB" if builtin.cached else "not cached"
        where = f"  {builtin.path}" if builtin.cached else ""
        print(f"{builtin.name:<22}{size:<12}{builtin.about}{where}")
    return 0


def run_pull(args: argparse.Namespace) -> int:
    """Make a model local and print its folder."""
    from headwater.models.resolve import resolve

    print(resolve(args.name, trust_remote_code=args.trust_remote_code))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Print what a model's folder holds; 1 if its weights are not exactly the model's."""
    from headwater.models.check import check_model
    from headwater.models.resolve import resolve

    path = resolve(args.name, trust_remote_code=args.trust_remote_code, offline=True)
    report = check_model(path, trust_remote_code=args.trust_remote_code)
    _print_report(report)
    if not report.loaded:
        raise UserError(
            f"{path} needs code that ships with it and none was run: read {', '.join(report.remote_code)}, then add "
            "--trust-remote-code"
        )
    return 0 if report.complete else 1


def _print_report(report: ModelReport) -> None:
    rows: dict[str, object] = {"path": report.path, "class": report.model_class, "model_type": report.model_type}
    if report.loaded:
        rows["tokenizer"] = report.tokenizer_class
        rows["vocab size"] = report.vocab_size
        rows["parameters"] = f"{report.parameters:,}"
        rows["chat template"] = "yes" if report.chat_template else "no"
    rows["remote code"] = f"needed: {', '.join(report.remote_code)}" if report.remote_code else "not needed"
    if report.loaded:
        rows["weights"] = "complete" if report.complete else "INCOMPLETE"
    for problem in ("missing", "misshapen", "unexpected"):
        for name in getattr(report, problem):
            rows[f"{problem} {name}"] = ""
    for label, value in rows.items():
        print(f"{label:<15}{value}".rstrip())


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
