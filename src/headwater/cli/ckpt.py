"""`headwater ckpt`: look at checkpoints, hash them again, compare two, export one, import one."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import freshness
from headwater.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from headwater.checkpoint.catalog import Found
    from headwater.checkpoint.diff import Diff
    from headwater.checkpoint.reader import Checkpoint

_CKPT_HELP = "a checkpoint's folder, or a run's checkpoint folder for its newest committed one"
_NAMES_SHOWN = 5


def add_parser(subparsers: Any) -> None:
    """Add `ckpt` and its sub-commands."""
    parser = subparsers.add_parser("ckpt", help="list, show, verify, compare and export checkpoints")
    commands = parser.add_subparsers(dest="ckpt_command", required=True, metavar="COMMAND")
    ls = commands.add_parser("ls", help="list the checkpoints of a run")
    ls.add_argument("dir", metavar="DIR", help="a run's checkpoint folder")
    ls.set_defaults(run=run_ls)
    show = commands.add_parser("show", help="what a checkpoint holds")
    show.add_argument("ckpt", metavar="CKPT", help=_CKPT_HELP)
    show.add_argument("--json", action="store_true", help="print the whole manifest as JSON")
    show.set_defaults(run=run_show)
    verify = commands.add_parser("verify", help="hash every file and chunk again; exit 1 where one does not hold")
    verify.add_argument("ckpt", metavar="CKPT", help=_CKPT_HELP)
    verify.set_defaults(run=run_verify)
    diff = commands.add_parser("diff", help="compare two checkpoints; exit 0 if identical, 1 if not")
    diff.add_argument("a", metavar="A", help=_CKPT_HELP)
    diff.add_argument("b", metavar="B", help=_CKPT_HELP)
    diff.add_argument("--json", action="store_true", help="print the differences as JSON")
    diff.set_defaults(run=run_diff)
    export = commands.add_parser("export", help="write a checkpoint in another format")
    export.add_argument("ckpt", metavar="CKPT", help=_CKPT_HELP)
    export.add_argument("output", metavar="OUTPUT", help="folder to make; it must not exist, or be empty")
    formats = "a Hugging Face model (adapters merged), torch DCP, Megatron's torch_dist, or adapters alone for PEFT"
    export.add_argument("--to", choices=("hf", "dcp", "torch_dist", "peft"), required=True, help=formats)
    export.add_argument("--component", default="policy", help="which part of the checkpoint (default: policy)")
    export.add_argument("--model", help="hf, torch_dist, peft: the model trained (default: the run's model_name)")
    export.set_defaults(run=run_export)
    take = commands.add_parser("import", help="make a Hugging Face model of another format's checkpoint")
    take.add_argument("folder", metavar="FOLDER", help="a Megatron torch_dist checkpoint: an iter_* folder")
    take.add_argument("output", metavar="OUTPUT", help="folder to make; it must not exist, or be empty")
    take.add_argument("--model", required=True, help="a model of that shape, for its config.json and tokenizer")
    take.set_defaults(run=run_import)
    freshness.add_parser(commands)


def run_ls(args: argparse.Namespace) -> int:
    """Print a table of all saves in a folder, committed or not."""
    from rich.table import Table

    from headwater.checkpoint.catalog import look_at, scan
    from headwater.checkpoint.commit import committed
    from headwater.checkpoint.preflight import size_text

    root = _existing(args.dir)
    found = [look_at(root)] if committed(root) else scan(root)
    if not found:
        print(f"no checkpoints in {root}")
        return 0
    table = Table()
    for column in ("step", "save id", "committed", "pinned", "size", "chunks", "date"):
        table.add_column(column, justify="right" if column in ("step", "size", "chunks") else "left")
    for item in found:
        manifest = item.manifest
        table.add_row(
            str(item.step),
            item.save_id,
            _commit_text(item),
            "yes" if item.pinned else "",
            size_text(sum(file.size for file in manifest.files)) if manifest else "",
            str(len(manifest.chunks)) if manifest else "",
            _date(manifest.saved_at_ns) if manifest else "",
        )
    _console().print(table)
    for item in found:
        if item.problem:
            print(item.problem, file=sys.stderr)
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Print what a checkpoint's manifest says."""
    from rich.table import Table

    from headwater.checkpoint.preflight import size_text

    checkpoint = _open(args.ckpt)
    manifest = checkpoint.manifest
    if args.json:
        print(manifest.to_json(), end="")
        return 0
    print(f"{checkpoint.folder}")
    print(f"step {manifest.step}, weight version {manifest.weight_version}, saved {_date(manifest.saved_at_ns)}")
    print(f"run {manifest.run_id}, save {manifest.save_id}, model {manifest.model_identity}")
    table = Table("component", "dtype")
    for column in ("tensors", "chunks", "size"):
        table.add_column(column, justify="right")
    for component, dtype in sorted({(chunk.component, chunk.dtype) for chunk in manifest.chunks}):
        chunks = [chunk for chunk in manifest.chunks if (chunk.component, chunk.dtype) == (component, dtype)]
        names = {chunk.name for chunk in chunks}
        size = size_text(sum(chunk.end - chunk.begin for chunk in chunks))
        table.add_row(component, dtype, str(len(names)), str(len(chunks)), size)
    console = _console()
    console.print(table)
    files = Table("file", "checksum")
    files.add_column("size", justify="right")
    for file in manifest.files:
        files.add_row(file.path, f"{file.checksum:016x}", size_text(file.size))
    console.print(files)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Hash a checkpoint again: 0 if all holds, 1 with a line for each file or chunk that does not."""
    from headwater.checkpoint.manifest import CorruptCheckpointError
    from headwater.checkpoint.reader import bytes_to_verify, verify

    try:
        checkpoint = _open(args.ckpt)
    except CorruptCheckpointError as error:
        print(error)
        return 1
    with _progress("verifying", bytes_to_verify(checkpoint)) as advance:
        problems = verify(checkpoint, advance)
    for problem in problems:
        print(problem)
    if not problems:
        manifest = checkpoint.manifest
        print(f"{checkpoint.folder}: holds ({len(manifest.files)} files, {len(manifest.chunks)} chunks)")
    return 1 if problems else 0


def run_diff(args: argparse.Namespace) -> int:
    """Compare two checkpoints: 0 if identical, 1 if not."""
    from headwater.checkpoint.diff import diff

    first, second = _open(args.a), _open(args.b)
    total = sum(chunk.end - chunk.begin for chunk in first.manifest.chunks)
    with _progress("comparing", total) as advance:
        result = diff(first, second, advance)
    if args.json:
        print(json.dumps(_json_ready({"identical": result.identical, **asdict(result)}), indent=1, allow_nan=False))
    elif result.identical:
        print("identical")
    else:
        print("\n".join(_diff_lines(result)))
    return 0 if result.identical else 1


def run_export(args: argparse.Namespace) -> int:
    """Write a checkpoint as a folder of another format: 0 if it is there, whole."""
    from headwater.checkpoint.export import export_dcp, stored_bytes
    from headwater.checkpoint.export_hf import export_hf, trained_model, weights_bytes
    from headwater.checkpoint.export_peft import export_peft

    checkpoint, output = _open(args.ckpt), Path(args.output).expanduser()
    if args.to == "hf":
        model = trained_model(checkpoint, args.component, args.model)
        with _progress("exporting", weights_bytes(checkpoint, args.component, model)) as advance:
            count = export_hf(checkpoint, args.component, output, model, advance)
    elif args.to == "peft":
        count = export_peft(checkpoint, args.component, output, args.model)
    elif args.to == "torch_dist":
        from headwater.checkpoint.export_megatron import export_megatron

        model, reader = trained_model(checkpoint, args.component, args.model), checkpoint.component(args.component)
        with _progress("exporting", stored_bytes(reader, reader.names())) as advance:
            count = export_megatron(checkpoint, args.component, output, model, advance)
    else:
        if args.model is not None:
            raise UserError("--model is for --to hf, torch_dist and peft: a torch DCP folder describes no model")
        reader = checkpoint.component(args.component)
        with _progress("exporting", stored_bytes(reader, reader.names())) as advance:
            count = export_dcp(checkpoint, args.component, output, advance)
    print(f"{output}: {count} tensors of {checkpoint.folder.name}")
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Write a Megatron checkpoint as a Hugging Face folder: 0 if it is there, whole."""
    from headwater.checkpoint.export_hf import local_model
    from headwater.checkpoint.import_megatron import import_megatron

    folder, output = _existing(args.folder), Path(args.output).expanduser()
    total = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    with _progress("importing", total) as advance:
        count, left_out = import_megatron(folder, local_model(args.model), output, advance)
    print(f"{output}: {count} tensors of {folder.name}; {left_out} rows beyond the vocabulary of {args.model} left out")
    return 0


def _diff_lines(result: Diff) -> list[str]:
    lines: list[str] = []
    for component in result.components:
        if component.identical:
            lines.append(f"{component.component}: {component.compared} tensors identical")
            continue
        if component.changed:
            lines.append(
                f"{component.component}: {len(component.changed)} of {component.compared} tensors differ by up to "
                f"{component.max_abs_difference:.3g}: {_some(component.changed)}"
            )
        for side, names in (("first", component.only_in_first), ("second", component.only_in_second)):
            if names:
                lines.append(f"{component.component}: {len(names)} only in the {side}: {_some(names)}")
    lines += [f"{field.path}: {_short(field.first)} and {_short(field.second)}" for field in result.fields]
    lines += [f"{path}: differs" for path in result.files]
    return lines


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _json_ready(value: Any) -> Any:
    """JSON has no NaN and no infinity: null and text stand for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    return value


def _existing(path: str) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder" if not folder.exists() else f"{folder}: not a folder")
    return folder


def _open(path: str) -> Checkpoint:
    """The checkpoint at `path`, or the newest committed one of the run whose folder it is."""
    from headwater.checkpoint.catalog import newest
    from headwater.checkpoint.commit import committed, parse_folder_name
    from headwater.checkpoint.reader import Checkpoint

    folder = _existing(path)
    if committed(folder) or parse_folder_name(folder.resolve().name):
        return Checkpoint.open(folder)
    found = newest(folder)
    if found is None:
        raise UserError(f"{folder}: neither a checkpoint nor a folder with a committed one")
    print(f"newest committed checkpoint of {folder}: {found.folder.name}", file=sys.stderr)
    return Checkpoint.open(found.folder)


def _commit_text(found: Found) -> str:
    if not found.committed:
        return "no"
    return "corrupt" if found.problem else "yes"


def _date(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9).isoformat(" ", "seconds")


def _console() -> Console:
    """Wide where nobody looks, so that redirected tables are not cut."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=200)


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on a terminal's error stream, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)
