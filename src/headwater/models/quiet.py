"""Keep transformers' progress bars and load reports off the terminal; Headwater shows its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from logging import CRITICAL


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and warnings inside the block, then restore what the user had set."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
