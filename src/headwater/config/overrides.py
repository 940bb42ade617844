"""Changes to a configuration as plain nested dicts and lists: a child recipe, or `a.b=c` from a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headwater.config.explain import show
from headwater.errors import UserError

FREE_FORM = "options"
"""Mappings under this key are arguments of what stands beside them, such as a dataset, so they replace."""

SOURCE = "dataset"
"""A mapping that names another one of these starts anew: the size, seed and columns beside it were the old one's."""

_WORDS = {"null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?inf|nan")


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it: mappings merge, all else replaces, lists and `options` mappings included."""
    merged = {} if _names_another_source(base, changes) else dict(base)
    for key, value in changes.items():
        merged[key] = _merged_value(key, merged.get(key), value)
    return merged


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Lay one override over `tree`, in place.

    `a.b=c` and `+a.b=c` (whether a key exists is for the schema to say); `a.0.b=c` for an item of a list. A value is
    null, true, false, a number, text, text in quotes, or a list or mapping in YAML's flow style; nothing is empty text.
    Raises UserError for what is no override, or leads into something that has no such item.
    """
    name, equals, text = override.partition("=")
    path = name.strip().removeprefix("+").removeprefix("+")
    if not equals:
        raise UserError(f"{override!r} is no override: write {path or 'key'}=VALUE")
    parts = path.split(".")
    if not all(parts):
        raise UserError(f"override {override!r}: the key must be names joined by dots, such as policy.optimizer.lr")

    node: Any = tree
    for depth, part in enumerate(parts):
        position = _position(node, part, parts[:depth])
        if depth == len(parts) - 1:
            current = node[position] if isinstance(node, list) else node.get(position)
            value = _parse_value(text.strip(), override)
            if isinstance(node, dict) and _names_another_source(node, {part: value}):
                node.clear()
            node[position] = _merged_value(part, current, value)
        else:
            if isinstance(node, dict) and node.get(position) is None:
                node[position] = {}
            node = node[position]


def _names_another_source(base: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    return SOURCE in changes and SOURCE in base and changes[SOURCE] != base[SOURCE]


def _merged_value(key: str, current: Any, value: Any) -> Any:
    if key != FREE_FORM and isinstance(current, Mapping) and isinstance(value, Mapping):
        return merge(current, value)
    return value


def _position(node: Any, part: str, above: list[str]) -> Any:
    """How `part` indexes `node`: a key of a mapping, or the number of a list's item."""
    if isinstance(node, dict):
        return part
    where = ".".join(above)
    if not isinstance(node, list):
        raise UserError(f"{where} is {show(node)}: it has no key {part}")
    if not (part.isdecimal() and int(part) < len(node)):
        raise UserError(f"{where} is a list of {len(node)}, numbered from 0: it has no item {part}")
    return int(part)


def _parse_value(text: str, override: str) -> Any:
    if text[:1] in ("[", "{", '"', "'"):
        try:
            return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index]
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise UserError(f"override {override!r}: {' '.join(str(error).split())}") from error
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
