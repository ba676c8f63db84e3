"""A scheduler's request to end is a user's."""

import os
import signal
import threading

import pytest

from undertow.cli.signals import terminable


def test_sigterm_is_an_interruption_within_the_block_only():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_nothing_changes():
    found = []

    def run() -> None:
        with terminable():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
