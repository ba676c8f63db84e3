"""One writer a run: a lock on the run directory that ends with the process, however that ends."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from undertow.config.errors import InputError
from undertow.train.disk import unwritable

LOCK = ".lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory`, which is made if it is not there, against every other process while the block runs.

    A directory that the block left empty goes again if it was made here. Raises `InputError`, naming the process, if
    one holds it, and where it cannot be written or its file system has no locks; `UndertowError` for a full disk.
    """
    made = not directory.exists()
    try:
        handle = _hold(directory)
    except OSError as error:
        raise unwritable(directory, error, "give out=DIR") from None
    try:
        yield
    finally:
        # While still held, so that nobody holds a file without a name: see _hold.
        (directory / LOCK).unlink(missing_ok=True)
        if made:
            with suppress(OSError):  # not empty
                directory.rmdir()
        os.close(handle)


def _hold(directory: Path) -> int:
    """The open file that carries the lock."""
    path = directory / LOCK
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # its last holder removed the directory just now
            continue
        try:
            _lock(handle, directory)
            if _names(path, handle):
                os.truncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last holder removed the file between open and lock


def _lock(handle: int, directory: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 300).decode("utf-8", "replace") or "another process"
        raise InputError(
            f"{directory}: {holder} is at work there; wait for it or stop it, or choose another directory with out=DIR"
        ) from None
    except OSError as error:
        raise InputError(
            f"{directory}: its file system cannot lock files ({error.strerror}), which keeps two runs apart; choose "
            "a directory on another one with out=DIR"
        ) from None


def _names(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
