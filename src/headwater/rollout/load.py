"""Find the functions and classes that users name in a recipe, and fix their options early."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from headwater.errors import UserError


def load_object(name: str, what: str) -> Any:
    """Import `module:attribute`; modules in the working directory are found too.

    what: "reward" or "environment", for the message. Raises UserError where there is no such thing or
    importing it fails.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{what} {name!r} is not of the form module:name")
    module = _import(module_name, f"{what} {name}")
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, [key for key in vars(module) if not key.startswith("_")], n=1)
        hint = f": did you mean {module_name}:{near[0]}?" if near else ""
        where = getattr(module, "__file__", None) or "a namespace package"
        raise UserError(f"{what} {name}: {module_name} ({where}) has no {attribute!r}{hint}") from None


def bind_options(
    target: Callable[..., Any], options: Mapping[str, Any], who: str, positional: int = 0
) -> Callable[..., Any]:
    """`target` with `options` as keyword arguments.

    positional: how many arguments the later caller passes by position. Raises UserError now, instead of at
    the first call, if `target` does not take the options, lacks one, or takes another number of arguments.
    """
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return functools.partial(target, **options)
    parameters = signature.parameters.values()
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][positional:]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in options:
        if option not in by_name and not takes_all:
            near = difflib.get_close_matches(option, by_name, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(by_name) or 'none'}"
            raise UserError(f"{who} has no option {option!r}: {hint}")
    try:
        signature.bind(*[None] * positional, **options)
    except TypeError as error:
        called = "(problem, completion)" if positional else "its options alone"
        raise UserError(f"{who} cannot be called with {called} and options {dict(options)}: {error}") from error
    return functools.partial(target, **options)


def _import(module: str, who: str) -> ModuleType:
    directory = os.getcwd()
    if not {"", directory} & set(sys.path):
        # Last, so that a file there never hides an installed package.
        sys.path.append(directory)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise UserError(f"{who}: no module {module!r} in {directory} or among the installed packages") from error
        raise UserError(f"{who}: importing {module} failed: {error}") from error
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{who}: importing {module} failed: {type(error).__name__}: {reason}") from error
