"""Plain Python values as JSON that gives the same values and types back, so that nothing is pickled.

JSON itself has no tuple, no NaN and no infinity; objects with one key that begins with "$" stand for them.
"""

from __future__ import annotations

import math
from typing import Any

from headwater.checkpoint.manifest import CorruptCheckpointError
from headwater.errors import UserError

_FLOATS = {"nan", "inf", "-inf"}


def encode(value: Any, where: str) -> Any:
    """The JSON form of None, bool, int, float, str, and lists, tuples and text-keyed dicts of them.

    Raises UserError, naming `where`, for any other type: subclasses too, since they would come back as something else.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [encode(item, where) for item in value]
    if kind is tuple:
        return {"$tuple": [encode(item, where) for item in value]}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, where) for key, item in value.items()}
    what = "dict with such keys" if kind is dict else f"{kind.__module__}.{kind.__qualname__}"
    raise UserError(
        f"{where}: a {what} cannot be stored without pickle, only None, bool, int, float, str, and lists, tuples and "
        "text-keyed dicts of them can: convert it, make it a tensor, or leave it out of the state"
    )


def decode(value: Any, where: str) -> Any:
    """The value that `encode` was given. Raises CorruptCheckpointError for JSON that it does not write."""
    if isinstance(value, list):
        return [decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, where) for key, item in value.items()}
    tag, content = next(iter(value.items()))
    if len(value) == 1 and tag == "$tuple" and isinstance(content, list):
        return tuple(decode(item, where) for item in content)
    if len(value) == 1 and tag == "$float" and content in _FLOATS:
        return float(content)
    raise CorruptCheckpointError(f"{where}: not a value that Headwater wrote")
