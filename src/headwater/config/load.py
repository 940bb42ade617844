"""From a recipe and overrides to a validated configuration.

A recipe is a YAML file: one that is packaged, by its name, or any, by its path. `defaults: parent` names the one it
changes. A child's mappings merge with its parent's; its lists, and the free-form mappings called `options`, replace
them: what one dataset or reward takes must not reach the next one. `${a.b}` refers to another key.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from headwater.config.explain import explain
from headwater.config.overrides import apply_override, merge
from headwater.config.schema import Config
from headwater.errors import UserError

_RECIPES = files("headwater.recipes")


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration.

    resolved_yaml: all of it, defaults included, as a recipe that loads to the same configuration.
    difference: one line a key that the overrides changed: `key: old -> new`, `+ key: new` or `- key: old`.
    """

    config: Config
    resolved_yaml: str
    difference: list[str]


def load_config(recipe: str = "grpo", overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a recipe, lay the overrides over it in their order, and validate.

    recipe: the name of a packaged recipe, or the path of a YAML file.
    overrides: `a.b=c`, as `headwater.config.overrides.apply_override` reads them.
    Raises UserError, in one line, for anything that is wrong with either.
    """
    read = _read_recipe(recipe, Path())
    base = merge(_defaults(Config, read), read)
    tree = copy.deepcopy(base)
    for override in overrides:
        apply_override(tree, override)
    config = _validate(tree)
    return LoadedConfig(config, _to_yaml(config.model_dump()), _changes(base, tree))


def recipe_names() -> list[str]:
    """The packaged recipes, sorted."""
    return sorted(item.name.removesuffix(".yaml") for item in _RECIPES.iterdir() if item.name.endswith(".yaml"))


def _defaults(model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """The schema's defaults as a tree, so that overrides and interpolations reach keys that no recipe sets.

    Those of a group that may be null stand there where `given` sets it.
    """
    tree: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        group = _group_class(field.annotation)
        value = given.get(name)
        if group is not None and (field.is_required() or isinstance(value, Mapping)):
            tree[name] = _defaults(group, value if isinstance(value, Mapping) else {})
        elif not field.is_required():
            default = copy.deepcopy(field.default)
            tree[name] = default.model_dump() if isinstance(default, BaseModel) else default
    return tree


def _group_class(annotation: Any) -> type[BaseModel] | None:
    """The class of a group, null or not; None where the annotation is of something else."""
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = [kind for kind in (get_args(annotation) if is_union else (annotation,)) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel) else None


def _read_recipe(name: str, folder: Path, children: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe merged over its parents. `folder` is where a relative path starts; `children` led here."""
    label, text, own_folder = _locate(name, folder)
    if label in children:
        raise UserError(f"recipes inherit in a circle: {' -> '.join((*children, label))}")
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split()).replace('in "<unicode string>", ', "")
        raise UserError(f"recipe {label} cannot be read: {reason}") from error
    if not isinstance(tree, dict):
        raise UserError(f"recipe {label} cannot be read: it is a list, not a mapping of groups such as policy")
    parent = tree.pop("defaults", None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise UserError(f"recipe {label}: defaults must be the name or path of one recipe, got {parent!r}")
    return merge(_read_recipe(parent, own_folder, (*children, label)), tree)


def _locate(name: str, folder: Path) -> tuple[str, str, Path]:
    """A recipe's label in messages, its text, and the folder that its relative paths start from."""
    names = recipe_names()
    if name in names:
        return name, (_RECIPES / f"{name}.yaml").read_text(encoding="utf-8"), Path()
    path = folder / Path(name).expanduser()
    if not path.is_file():
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown recipe {name}: {hint}packaged are {', '.join(names)}; else give a YAML file's path")
    try:
        return str(path.resolve()), path.read_text(encoding="utf-8"), path.parent
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} cannot be read: {error}") from error


def _validate(tree: dict[str, Any]) -> Config:
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key}: required and not set") from error
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"{key}{str(error).splitlines()[0]}") from error
    try:
        return Config.model_validate(resolved)
    except ValidationError as error:
        unset = {name for name in Config.model_fields if tree.get(name) is None}
        raise UserError(explain(error, unset)) from error


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two validated trees, or between their bare keys where overrides complete the recipe."""
    try:
        return _difference(_validate(before).model_dump(), _validate(after).model_dump())
    except UserError:
        return _difference(before, after)


def _to_yaml(tree: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(_escape_interpolations(tree)))


def _escape_interpolations(value: Any) -> Any:
    """Text that holds a literal ${ must not become an interpolation when it is read again."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: _escape_interpolations(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_interpolations(item) for item in value]
    return value


def _difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    old, new = dict(_leaves(before, "")), dict(_leaves(after, ""))
    lines = []
    for key in [*new, *(key for key in old if key not in new)]:
        if key not in old:
            lines.append(f"+ {key}: {new[key]}")
        elif key not in new:
            lines.append(f"- {key}: {old[key]}")
        elif old[key] != new[key]:
            lines.append(f"{key}: {old[key]} -> {new[key]}")
    return lines


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Each dotted key with its value as JSON; lists of mappings are entered by number."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = list(enumerate(value))
    else:
        yield path, json.dumps(value, ensure_ascii=False, default=str)
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))
