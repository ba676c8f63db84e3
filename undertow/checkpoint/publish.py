"""Replacing a model directory in one step: a reader, or a kill at any moment, sees the old one or the new one whole."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from undertow.checkpoint.shards import INDEX, sync
from undertow.config.errors import InputError, UndertowError

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "generation_config.json",
)
"""Files beside the weights that a new save keeps."""

_KEPT = re.compile(r"README\.md|LICENSE.*|\.gitattributes")
_REPLACED = re.compile(rf"config\.json|{re.escape(INDEX)}|.*\.safetensors|conversion\.json|SHA256SUMS")
_AT_CWD, _EXCHANGE = -100, 2  # <fcntl.h> AT_FDCWD, <linux/fs.h> RENAME_EXCHANGE


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new directory to fill, which takes the place of `target` when the block ends without an error.

    An existing `target` must be empty or a model directory; its tokenizer files, README and licence are carried over
    unless the block writes its own. On Linux the swap is one system call. Where the file system has no exchange, there
    is a moment between two renames in which only `previous_of(target)` exists, complete.
    Raises `InputError` for a target that holds anything else, is the working directory or cannot be written,
    `UndertowError` if writing fails.
    """
    target = Path(os.path.realpath(target))
    if target.is_dir() and os.path.samefile(target, os.curdir):
        raise InputError(
            f"{target}: is the working directory, which the new model would take away; name another directory, "
            "or give this one by its path from elsewhere"
        )
    kept = _kept_files(target)
    prefix = f".{target.name}.writing-{socket.gethostname()}-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent, prefix)
        fresh = target.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
        fresh.mkdir()
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror})") from None
    try:
        yield fresh
        for name in kept:
            if not (fresh / name).exists():
                shutil.copyfile(target / name, fresh / name)
        for file in fresh.iterdir():
            sync(file)
        sync(fresh)
        swap(fresh, target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise UndertowError(f"{target}: cannot be written ({error}); what was there is untouched") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def previous_of(target: Path) -> Path:
    """Where the old directory waits for a moment on file systems that cannot exchange two names."""
    target = Path(os.path.realpath(target))
    return target.with_name(f".{target.name}.previous")


def _kept_files(target: Path) -> list[str]:
    if not target.exists():
        return []
    if not target.is_dir():
        raise InputError(f"{target}: is a file; a model is saved as a directory")
    names = sorted(path.name for path in target.iterdir())
    kept = [name for name in names if name in TOKENIZER_FILES or _KEPT.fullmatch(name)]
    strange = [name for name in names if name not in kept and not _REPLACED.fullmatch(name)]
    folders = [name for name in names if (target / name).is_dir()]
    if strange or folders:
        raise InputError(
            f"{target}: holds {(folders + strange)[0]!r}, no part of a model, that would be lost; choose a new one"
        )
    if names and "config.json" not in names:
        raise InputError(f"{target}: is not empty and no model directory (no config.json); save to a new directory")
    return kept


def _sweep(parent: Path, prefix: str) -> None:
    """Remove what saves of this host that were killed have left."""
    for path in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        owner = path.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not _alive(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def swap(fresh: Path, target: Path) -> None:
    """Put `fresh` at `target`; what was there is afterwards at `fresh`, or gone."""
    if not target.exists():
        os.rename(fresh, target)
        return
    if _exchange(fresh, target):
        return
    previous = previous_of(target)
    shutil.rmtree(previous, ignore_errors=True)
    os.rename(target, previous)
    try:
        os.rename(fresh, target)
    except OSError:
        os.rename(previous, target)
        raise
    shutil.rmtree(previous)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step. False where the system or the file system has no such call."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(other))
