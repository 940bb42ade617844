"""Keeps Python's garbage collector out of a save's call."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection in here, by any thread.

    A save makes a few objects for each tensor. Thousands at once have the collector look through all objects of the
    program every third save, which takes a quarter of a second where a model library is loaded.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
