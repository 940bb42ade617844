"""From what pydantic found wrong to one line that names each key, what was expected and the nearest valid key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import SequenceMatcher
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headwater.config.schema import Config

_EXPECTED = {
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
_SHOWN_CHARACTERS = 60


def explain(error: ValidationError, unset: Collection[str] = ()) -> str:
    """All that is wrong with a configuration, in one line, each problem once, joined by semicolons.

    unset: groups that it does without, so that no key of theirs is proposed.
    """
    return "; ".join(dict.fromkeys(_explain_one(detail, unset) for detail in error.errors()))


def show(value: Any) -> str:
    """A value as a message shows it: in the words of YAML, text in quotes, shortened."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def nearest_key(unknown: str, unset: Collection[str] = ()) -> str:
    """The schema's dotted key that is most like the given one, of none of the groups `unset`.

    The last part counts as much as the whole path, so that a right name in the wrong group finds its group.
    """
    wanted = re.sub(r"(?<=\.)\d+(?=\.|$)", "0", unknown)

    def likeness(key: str) -> float:
        last_part = SequenceMatcher(None, wanted.rpartition(".")[2], key.rpartition(".")[2]).ratio()
        return last_part + SequenceMatcher(None, wanted, key).ratio()

    keys = [key for key in schema_keys() if key.partition(".")[0] not in unset]
    best = max(keys, key=likeness)
    index = re.search(r"\.(\d+)(?=\.|$)", unknown)
    return re.sub(r"\.0(?=\.)", f".{index[1]}", best) if index else best


@cache
def schema_keys() -> tuple[str, ...]:
    """Every dotted key of the configuration, groups included; the items of a list stand under 0."""
    return tuple(_keys_of(Config, ""))


def _keys_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for nested, item in _models_in(field.annotation):
            yield from _keys_of(nested, f"{prefix}{name}.{item}")


def _models_in(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """The model classes within an annotation, each with "0." where it is the item of a list, else ""."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
    for argument in get_args(annotation):
        for model, item in _models_in(argument):
            yield model, "0." if get_origin(annotation) is list else item


def _explain_one(detail: ErrorDetails, unset: Collection[str]) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        path = _down_to_single_leaf(path, value)
        return f"unknown key {path}; did you mean {nearest_key(path, unset)}?"
    if kind == "missing":
        return f"{path}: required and not set"
    if kind == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return f"{path}: {message}" if path else message
    if kind == "literal_error":
        return f"{path}: expected {detail.get('ctx', {})['expected']}, got {show(value)}"
    if kind in _EXPECTED:
        remedy = ": put it in quotes" if kind == "string_type" and isinstance(value, int | float) else ""
        return f"{path}: expected {_EXPECTED[kind]}, got {show(value)}{remedy}"
    return f"{path}: {detail['msg'].replace('Input should', 'must')}, got {show(value)}"


def _down_to_single_leaf(path: str, value: Any) -> str:
    """An override of an unknown group is named as the user wrote it, down to its key."""
    while isinstance(value, Mapping) and len(value) == 1:
        ((key, value),) = value.items()
        path = f"{path}.{key}"
    return path
