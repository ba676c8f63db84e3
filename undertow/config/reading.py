"""Reading a user's file without waiting and without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file, `most` at most. Raises `OSError` with a reason for a larger one, a directory, and
    what may never end, such as a device or a pipe, which are not opened."""
    _refuse(os.stat(path).st_mode, path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        _refuse(os.fstat(file.fileno()).st_mode, path)  # it may have been replaced meanwhile
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content


def _refuse(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
