"""Boxes of tensors in the safetensors files of a Hugging Face folder; nothing else of them is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headwater.bridge.pieces import Piece
from headwater.errors import UserError


class WeightFolder:
    """Raises UserError where the folder has no safetensors files, or one cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        index = path / "model.safetensors.index.json"
        if index.exists():
            try:
                files = dict[str, str](json.loads(index.read_text())["weight_map"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise UserError(f"{index} cannot be read as an index of safetensors files ({error})") from error
        elif (path / "model.safetensors").exists():
            with _opened(path / "model.safetensors") as file:
                files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise UserError(f"{path} has no model.safetensors: weights are read from safetensors files alone")
        self._files = files

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return list(self._files)

    @contextmanager
    def opened(self) -> Iterator[OpenFolder]:
        """To read boxes from."""
        files: dict[str, Any] = {}
        try:
            yield OpenFolder(self._path, self._files, files)
        finally:
            for file in files.values():
                file.__exit__(None, None, None)


class OpenFolder:
    """The files that were needed so far are open."""

    def __init__(self, path: Path, files: dict[str, str], opened: dict[str, Any]) -> None:
        self._path = path
        self._files = files
        self._opened = opened

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self._file_of(name).get_slice(name).get_shape())

    def whole(self, name: str) -> torch.Tensor:
        """A tensor, as it is stored."""
        return self._file_of(name).get_tensor(name)

    def box(self, piece: Piece) -> torch.Tensor:
        """The piece's box. Raises UserError where the tensor has another shape than the piece says."""
        stored = self._file_of(piece.name).get_slice(piece.name)
        if tuple(stored.get_shape()) != piece.global_shape:
            raise UserError(
                f"{self._path}: {piece.name} has the shape {tuple(stored.get_shape())}, the model's configuration "
                f"says {piece.global_shape}"
            )
        return stored[piece.index]

    def _file_of(self, tensor: str) -> Any:
        name = self._files[tensor]
        if name not in self._opened:
            self._opened[name] = _opened(self._path / name).__enter__()
        return self._opened[name]


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
