"""Writing a user's file whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from undertow.config.errors import InputError


def write_file(path: Path, content: str | Iterable[str], mend: str) -> None:
    """Replace a file by text in UTF-8, in one step, however many write it at once; its mode is kept.

    A link is followed and stays. What is there and is no regular file, such as a device or a pipe, is written into. An
    interrupted or failed write leaves what was there. `content` may come in pieces, which are not kept. Raises
    `InputError` in a sentence that ends with `mend`, what to do instead.
    """
    pieces = [content] if isinstance(content, str) else content
    try:
        mode = _mode(path)
        if mode is not None and not stat.S_ISREG(mode):
            _write(os.open(path, os.O_WRONLY), pieces, disk=False)  # a directory says here that it is one
        else:
            _replace(Path(os.path.realpath(path)), pieces, mode)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); {mend}") from None
    except ValueError:  # a NUL in the name
        raise InputError(f"{str(path)!r}: is no name of a file; {mend}") from None


def _mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _replace(target: Path, pieces: Iterable[str], mode: int | None) -> None:
    fresh = target.parent / f".undertow-{secrets.token_hex(8)}.writing"
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        if mode is not None:
            os.fchmod(handle, stat.S_IMODE(mode))
        _write(handle, pieces, disk=True)
        os.replace(fresh, target)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot; the file itself is on the disk
            os.fsync(folder)
    finally:
        os.close(folder)


def _write(handle: int, pieces: Iterable[str], *, disk: bool) -> None:
    # A name that is no UTF-8 reaches a text as lone surrogates, which are spelt out.
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(pieces)
        file.flush()
        if disk:
            os.fsync(handle)
