"""`undertow train` in a process that ends at once when the one that started it does, however that ended.

Its standard input is a pipe whose other end its parent alone holds and never writes to: the system closes that end with
the parent, even one that is killed, and reading then returns.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from undertow.cli import main


def _end_with_parent() -> None:
    os.read(0, 1)  # the descriptor, as the buffered sys.stdin would be locked at this process' own end
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(["train", *sys.argv[1:]]))
