"""Ctrl-C, a scheduler's SIGTERM and a lost terminal as a question that the loop asks between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within the block the first SIGINT, SIGTERM or SIGHUP only makes the yielded function return True.

    A SIGINT after that raises `KeyboardInterrupt` at once. A signal that was ignored stays so; the handlers are as
    before when the block ends. Outside the main thread, where Python delivers no signals, the answer is always False.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # None is a handler that Python did not install and cannot put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, receive)
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
