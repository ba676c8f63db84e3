"""Files that grow with a run: whole records or an error, which is the user's mistake or the disk's."""

from __future__ import annotations

import errno
from io import FileIO
from pathlib import Path

from undertow.config.errors import InputError, UndertowError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def unwritable(path: Path, error: OSError, mend: str) -> UndertowError:
    """The error to raise: a full disk is a failure of the work, any other place that cannot be written bad input.

    `mend` is what to do in the second case.
    """
    if error.errno in _FULL:
        return UndertowError(f"{path}: cannot be written ({error.strerror}); make room, then go on with --resume auto")
    return InputError(f"{path}: cannot be written ({error.strerror}); {mend}")


def append(file: FileIO, record: bytes) -> None:
    """Write all of `record` to an unbuffered file. Raises `OSError` if only a part of it finds room."""
    while record:
        record = record[file.write(record) :]
