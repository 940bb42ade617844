"""A nested state dict as named tensors and JSON, and back."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headwater.checkpoint.dtypes import dtype_name
from headwater.errors import UserError

_TENSORS = {torch.Tensor, torch.nn.Parameter}
_LEAVES = _TENSORS | {bool, int, float, str, type(None)}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def flatten(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Take a state dict apart into its tensors by name and a JSON value that refers to them.

    state: dicts (keys: str, int, float, bool or None), lists and tuples of tensors and of None, bool, int, float, str.
    A tensor that occurs twice is stored once and is one tensor again after loading. Names are the dotted paths.
    Raises UserError naming the path of anything else.
    """
    flattening = _Flattening()
    tree = flattening.visit(state, ())
    return flattening.tensors, tree


class _Flattening:
    """No closure that calls itself: such a cycle would keep the tensors alive until the garbage is collected."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def visit(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            _check_tensor(value, path)
            if id(value) not in self._names:
                self._names[id(value)] = name = _unused_name(".".join(path) or "tensor", self.tensors)
                self.tensors[name] = value
            return {"tensor": self._names[id(value)]}
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, Mapping):
            return {"dict": [[_key(key, path), self.visit(item, (*path, str(key)))] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.visit(item, (*path, str(index))) for index, item in enumerate(value)]}
        raise UserError(
            f"state_dict entry {_path(path)} is a {type(value).__name__}, which a checkpoint does not hold: "
            "save tensors, numbers, strings, and dicts, lists and tuples of them"
        )


@dataclass
class Frozen:
    """A state dict as it was: `state` has containers of its own and the very tensors.

    structure: equal for two state dicts that have the same containers, keys and types of values.
    """

    state: Any
    structure: list[object]
    tensors: list[torch.Tensor]


def freeze(state: Any) -> Frozen | None:
    """Take hold of a state dict in as little time as it can be; None where it holds what is not seen at once."""
    structure: list[object] = []
    leaves: list[Any] = []
    try:
        frozen = _freeze(state, structure, leaves)
    except TypeError:
        return None
    return Frozen(frozen, structure, [leaf for leaf in leaves if type(leaf) in _TENSORS])


def _freeze(value: Any, structure: list[object], leaves: list[Any]) -> Any:
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        values = value.values()
        structure += value
    elif kind is list or kind is tuple:
        values = value
    else:
        raise TypeError
    kinds = list(map(type, values))
    structure += kinds
    structure += (kind, len(kinds))
    if _LEAVES.issuperset(kinds):
        leaves += values
        return value if kind is tuple else value.copy()
    taken = []
    for item, item_kind in zip(values, kinds, strict=True):
        if item_kind in _LEAVES:
            leaves.append(item)
            taken.append(item)
        else:
            taken.append(_freeze(item, structure, leaves))
    return dict(zip(value, taken, strict=True)) if kind is dict or kind is OrderedDict else kind(taken)


def unflatten(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `flatten`. tensor: gives the tensor of a name; called once for each."""
    return _unflatten(tree, tensor, {})


def _unflatten(node: Any, tensor: Callable[[str], torch.Tensor], made: dict[str, torch.Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "tensor":
        if value not in made:
            made[value] = tensor(value)
        return made[value]
    if kind == "float":
        return _FLOATS[value]
    if kind == "dict":
        return {_unflatten(key, tensor, made): _unflatten(item, tensor, made) for key, item in value}
    items = [_unflatten(item, tensor, made) for item in value]
    return items if kind == "list" else tuple(items)


def _check_tensor(value: torch.Tensor, path: tuple[str, ...]) -> None:
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout != torch.strided:
        raise UserError(
            f"state_dict entry {_path(path)} is a {type(value).__name__} of layout {value.layout}: "
            "save its plain local tensor"
        )
    if value.device.type not in ("cpu", "cuda"):
        raise UserError(f"state_dict entry {_path(path)} is on {value.device}: save a copy of it on the CPU")
    try:
        dtype_name(value.dtype)
    except ValueError as error:
        raise UserError(f"state_dict entry {_path(path)}: {error}") from None


def _unused_name(wanted: str, taken: Mapping[str, torch.Tensor]) -> str:
    if not wanted.isprintable():
        wanted = "".join(char if char.isprintable() else "_" for char in wanted)
    name, count = wanted, 1
    while name in taken:  # a key may hold the dot that joins a path
        count += 1
        name = f"{wanted}#{count}"
    return name


def _key(key: Any, path: tuple[str, ...]) -> Any:
    if key is None or type(key) in (str, int, bool) or (type(key) is float and math.isfinite(key)):
        return key
    raise UserError(f"state_dict entry {_path(path)} has the key {key!r}: keys are strings, numbers or None")


def _path(path: tuple[str, ...]) -> str:
    return ".".join(path) or "(the whole)"
