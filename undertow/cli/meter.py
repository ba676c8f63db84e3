"""A line on the terminal that says how far a search is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 1.0  # seconds before anything is shown


@contextmanager
def meter(what: str) -> Iterator[Callable[[int, int], None]]:
    """Called with what is done and how many there are, shows both on standard error if that is a terminal; the line is
    gone at the end."""
    begun, shown = time.monotonic(), False

    def show(done: int, of: int) -> None:
        nonlocal shown
        if sys.stderr is not None and sys.stderr.isatty() and time.monotonic() - begun > _PATIENCE:
            print(f"\r{what}: {done} of {of}", end="", file=sys.stderr, flush=True)
            shown = True

    try:
        yield show
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
