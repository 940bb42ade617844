"""Rows of stored datasets, checked: a prompt or a conversation, a reference answer, and the rest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.config.schema import DatasetConfig
from headwater.data.types import Message
from headwater.errors import UserError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Row:
    """prompt: a question, or chat messages that end with a user's turn. rest: the other columns."""

    prompt: str | Sequence[Message]
    answer: str | None
    rest: Mapping[str, Any]


@dataclass(frozen=True)
class RowReader:
    """size: number of rows. row(index): one of them, UserError if malformed. fingerprint: of the content."""

    size: int
    row: Callable[[int], Row]
    fingerprint: str


def read_jsonl(path: Path, config: DatasetConfig) -> RowReader:
    """Read a file of one JSON object a line; blank lines are passed over. All rows are checked now.

    Raises UserError with the number of the first bad line.
    """
    if config.split is not None:
        raise UserError(f"split is for folders of Hugging Face datasets, and {config.dataset} is none: remove it")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read dataset {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        if config.size is not None and len(rows) == config.size:
            break
        if line.strip():
            rows.append(parse_row(_parse_line(line, f"{path} line {number}"), config, f"{path} line {number}"))
    if not rows:
        raise UserError(f"dataset {path} is empty: it has no rows")
    return RowReader(len(rows), rows.__getitem__, hashlib.sha256(content).hexdigest())


def read_hf_folder(path: Path, config: DatasetConfig) -> RowReader:
    """Open a folder written by `save_to_disk` of Hugging Face datasets; rows are read when asked for.

    Raises UserError if it is none, lacks the split or a column, or is empty.
    """
    from datasets import Dataset

    folder = _split_folder(path, config.split)
    try:
        # The package cannot open a folder that it saved without rows.
        empty = not json.loads((folder / "state.json").read_text("utf-8"))["_data_files"]
        table = Dataset.from_dict({}) if empty else Dataset.load_from_disk(str(folder))
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"cannot read dataset {path}: {reason}") from error
    if not len(table):
        raise UserError(f"dataset {folder} is empty: it has no rows")
    _check_columns(table.column_names, config, f"dataset {path}")
    size = min(len(table), config.size or len(table))

    def row(index: int) -> Row:
        return parse_row(table[index], config, f"dataset {path} row {index}")

    row(0)
    return RowReader(size, row, str(table._fingerprint))


def parse_row(record: Mapping[str, Any], config: DatasetConfig, where: str) -> Row:
    """Take prompt and answer out of a record by the configured columns. Raises UserError that names `where`."""
    _check_columns(list(record), config, where)
    prompt = record[config.prompt_key]
    answer = None if config.answer_key is None else record[config.answer_key]
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
        raise UserError(f"{where}: {config.answer_key!r} must be text or a number, not {type(answer).__name__}")
    rest = {key: value for key, value in record.items() if key not in (config.prompt_key, config.answer_key)}
    return Row(_check_prompt(prompt, config.prompt_key, where), None if answer is None else str(answer), rest)


def _split_folder(path: Path, split: str | None) -> Path:
    """The folder of the chosen split; `path` itself where there are none to choose from."""
    if (path / "dataset_info.json").is_file():
        if split is not None:
            raise UserError(f"dataset {path} is a single split: remove split={split}")
        return path
    listing = path / "dataset_dict.json"
    if not listing.is_file():
        raise UserError(f"{path} is not a folder saved by Hugging Face datasets (`dataset.save_to_disk`)")
    try:
        splits = json.loads(listing.read_text("utf-8"))["splits"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read dataset {path}: {listing.name} does not list its splits") from error
    if split is None:
        raise UserError(f"dataset {path} has splits: set split to one of {', '.join(splits)}")
    if split not in splits:
        raise UserError(f"dataset {path} has no split {split!r}: it has {', '.join(splits)}")
    return path / split


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object but {type(record).__name__}")
    return record


def _check_columns(columns: Sequence[str], config: DatasetConfig, where: str) -> None:
    for key, value in (("prompt_key", config.prompt_key), ("answer_key", config.answer_key)):
        if value is not None and value not in columns:
            null = " or null" if key == "answer_key" else ""
            raise UserError(f"{where} has no column {value!r}: set {key} to one of {', '.join(columns)}{null}")


def _check_prompt(prompt: Any, key: str, where: str) -> str | tuple[Message, ...]:
    if prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
        raise UserError(f"{where}: {key!r} is empty")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise UserError(f"{where}: {key!r} must be text or a list of chat messages, not {type(prompt).__name__}")
    for turn in prompt:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), str) or turn.get("role") not in ROLES:
            raise UserError(f"{where}: each message of {key!r} needs content (text) and role ({', '.join(ROLES)})")
    if prompt[-1]["role"] != "user":
        raise UserError(f"{where}: the last message of {key!r} must be a user's turn, not {prompt[-1]['role']}'s")
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in prompt)
