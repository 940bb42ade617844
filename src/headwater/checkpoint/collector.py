"""Keeps Python's garbage collector out of what handles thousands of tensors while training waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_pauses = 0
"""How many are in `collector_paused` that found the collector on."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection in here, by any thread; a program that has turned the collector off finds it off again.

    A save makes a few objects for each tensor. Thousands at once have the collector look through all objects of the
    program every third save, which takes a quarter of a second where a model library is loaded.
    """
    global _pauses
    if not gc.isenabled() and not _pauses:
        yield
        return
    _pauses += 1
    gc.disable()
    try:
        yield
    finally:
        _pauses -= 1
        if not _pauses:
            gc.enable()


@contextmanager
def collector_running() -> Iterator[None]:
    """For what may take long within `collector_paused`: a wait, or a whole write."""
    if not _pauses:
        yield
        return
    gc.enable()
    try:
        yield
    finally:
        if _pauses:  # another thread's, which may have ended meanwhile
            gc.disable()
