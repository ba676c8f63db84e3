"""A scheduler's request to end is a user's."""

import os
import signal
import subprocess
import sys
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


def test_the_end_of_the_parent_is_a_sigterm():
    child = "import time\nfrom undertow.cli.signals import following, terminable\n"
    child += "with terminable(), following(0.05):\n  print('on', flush=True)\n"
    child += "  try:\n    time.sleep(60)\n  except KeyboardInterrupt:\n    print('interrupted', flush=True)"
    launcher = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    process.kill()
    assert process.stdout.read() == "interrupted\n"  # until the child has closed it too
    process.wait()
    process.stdout.close()
