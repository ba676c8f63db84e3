"""SIGTERM as Ctrl-C: a scheduler's request ends a verb in the same way as a user's, with exit code 130; so does the
end of a launcher."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM raises `KeyboardInterrupt`; nothing changes outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def following(period: float = 1.0) -> Iterator[None]:
    """Within the block the end of the parent process is a SIGTERM to this one, at most `period` seconds later.

    A launcher that is killed cannot tell its processes; they would go on, and hold their run directory.
    """
    parent, over = os.getppid(), threading.Event()

    def watch() -> None:
        while not over.wait(period):
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, name="undertow-parent", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
