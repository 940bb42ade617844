"""The files of a checkpoint beside its tensors."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.errors import HeadwaterError, UserError

SaveTokenizer = Callable[[Path], object]


def trainer_json(state: Mapping[str, Any]) -> bytes:
    """The trainer's state as a file. Raises HeadwaterError where it is not JSON."""
    try:
        return (json.dumps(state, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise HeadwaterError(f"the trainer's state cannot be saved as JSON: {error}") from None


def write_tokenizer(tokenizer: SaveTokenizer, target: Path) -> None:
    """Have the tokenizer's files written to `target`. Raises OSError, or UserError where it was turned into another."""
    try:
        tokenizer(target)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception where the disk is full
        raise UserError(f"the tokenizer's files cannot be written to {target}: {error}") from error


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """An empty folder named tokenizer, removed at the end."""
    try:
        with tempfile.TemporaryDirectory(prefix="headwater-") as parent:
            folder = Path(parent) / "tokenizer"
            folder.mkdir()
            yield folder
    except OSError as error:
        raise UserError(
            f"the tokenizer's files cannot be written to {tempfile.gettempdir()}: {error.strerror or error}: "
            "free space there, or set TMPDIR to another folder"
        ) from error


class TokenizerFiles:
    """A tokenizer's files in memory, made once, since a run's tokenizer stays."""

    def __init__(self) -> None:
        self._made_by: SaveTokenizer | None = None
        self._files: dict[str, bytes] = {}

    def of(self, tokenizer: SaveTokenizer | None) -> dict[str, bytes]:
        """Path in the checkpoint and content of each file. Raises UserError where they cannot be written."""
        if tokenizer is None:
            return {}
        if self._made_by != tokenizer:
            with _scratch_folder() as scratch:
                write_tokenizer(tokenizer, scratch)
                paths = sorted(item for item in scratch.rglob("*") if item.is_file())
                self._files = {path.relative_to(scratch.parent).as_posix(): path.read_bytes() for path in paths}
            self._made_by = tokenizer
        return self._files
