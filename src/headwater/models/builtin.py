"""Models that come by a name of their own, `builtin:<name>`, and live in the user cache."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import UserError
from headwater.models.cache import cache_dir, make_folder
from headwater.models.smollm2 import make_smollm2
from headwater.models.tiny import make_tiny

PREFIX = "builtin:"


@dataclass(frozen=True)
class Builtin:
    """One built-in model.

    folder: its name in the cache; the number at the end changes when what `make` writes changes.
    downloads: whether `make` needs a network unless its source is in the cache already.
    """

    name: str
    folder: str
    about: str
    downloads: bool
    make: Callable[[Path], None]

    @property
    def path(self) -> Path:
        """Where it is, or will be."""
        return cache_dir() / "models" / self.folder

    @property
    def cached(self) -> bool:
        return self.path.is_dir()

    def ensure(self) -> Path:
        """Its folder, made first if need be. Raises what `make` raises, and UserError for an unwritable cache."""
        return make_folder(self.path, self.make)


BUILTINS = {
    builtin.name: builtin
    for builtin in (
        Builtin(
            "builtin:smollm2-135m",
            "smollm2-135m-1",
            "SmolLM2-135M-Instruct, bf16 (downloads 93 MB)",
            True,
            make_smollm2,
        ),
        Builtin("builtin:tiny", "tiny-1", "random Llama of 1M parameters, byte-level tokenizer", False, make_tiny),
    )
}


def nearest_builtin(name: str) -> str:
    """The built-in whose name is most like `name`, with or without the prefix."""
    short = {full.removeprefix(PREFIX): full for full in BUILTINS}
    return short[difflib.get_close_matches(name.removeprefix(PREFIX), short, n=1, cutoff=0.0)[0]]


def find_builtin(name: str) -> Builtin:
    """The built-in of that full name. Raises UserError with the nearest one."""
    if name not in BUILTINS:
        raise UserError(f"no built-in model {name!r}: did you mean {nearest_builtin(name)!r}? (`headwater models ls`)")
    return BUILTINS[name]
