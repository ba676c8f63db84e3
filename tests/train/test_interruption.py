"""The first signal is a question, the next Ctrl-C is answered at once."""

import os
import signal
import threading

import pytest

from undertow.train.interruption import interruptible


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers():
    """Those of before, whatever a test does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_asked_for(number, handlers):
    with interruptible() as asked:
        assert not asked()
        send(number)
        assert asked() and asked()
    assert {n: signal.getsignal(n) for n in handlers} == handlers


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_further_ctrl_c_does_not_wait(first, handlers):
    with pytest.raises(KeyboardInterrupt), interruptible() as asked:
        send(first)
        assert asked()
        send(signal.SIGINT)
    assert {n: signal.getsignal(n) for n in handlers} == handlers


def test_a_further_sigterm_changes_nothing():
    with interruptible() as asked:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert asked()


def test_each_block_asks_for_itself():
    with interruptible() as asked:
        send(signal.SIGINT)
        assert asked()
    with interruptible() as again:
        assert not again()


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible() as asked:
        send(signal.SIGINT)
        assert not asked()
        send(signal.SIGTERM)
        assert asked()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_outside_the_main_thread_nothing_is_touched(handlers):
    seen = []

    def elsewhere() -> None:
        with interruptible() as asked:
            seen.append((asked(), {n: signal.getsignal(n) for n in handlers}))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(False, handlers)]
