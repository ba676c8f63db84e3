"""What a conversion has finished, so that one that was killed goes on: a hidden directory, and a journal beside it.

The files lie in `.NAME.converting` next to the target and the journal in `.NAME.journal`; a line is added once its file
is on disk. Both are of one conversion: the first line of the journal says which.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from pathlib import Path
from types import TracebackType
from typing import Any

from undertow.checkpoint.convert.identity import VERSION, difference
from undertow.checkpoint.convert.writing import Written
from undertow.checkpoint.shards import sync
from undertow.config.errors import DoesNotFit, InputError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OWN = (".part", ".safetensors")
_LINE = {"file", "size", "mtime", "sha256", "rounded"}
_START = f'{{"{VERSION}": '.encode()  # of every journal


def drop_journal(target: Path) -> None:
    """Remove the journal that a kill between the last two steps has left beside a finished `target`."""
    path = target.with_name(f".{target.name}.journal")
    if path.is_file() and not path.is_symlink():
        with path.open("rb") as file:
            ours = _is_journal(file.read(len(_START)))
        if ours:
            path.unlink()


def _is_journal(text: bytes) -> bool:
    """Whether a journal begins so; a kill may have cut its first line short."""
    return text[: len(_START)] == _START[: len(text)]


class Journal:
    """The journal of the conversion `identity` to `target`, held by one process. Use as a context manager.

    Raises `InputError` if another process holds it, if what it holds is another conversion, and if what has its names
    is none; `OSError`, with nothing left behind, where the disk is full.
    """

    def __init__(self, target: Path, identity: dict[str, Any]):
        self.folder = target.with_name(f".{target.name}.converting")
        self.path = target.with_name(f".{target.name}.journal")
        self.written: dict[str, Written] = {}
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._handle = os.open(self.path, flags, 0o666)
        except OSError as error:
            if error.errno in _FULL:
                raise
            raise InputError(f"{target}: cannot be written ({error.strerror})") from None
        state = os.fstat(self._handle)
        if not stat.S_ISREG(state.st_mode):
            os.close(self._handle)
            raise InputError(f"{self.path}: is a pipe or a device, no journal; remove it")
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self._handle))):
                raise BlockingIOError  # who held it has ended just now, and taken it along
            self._begin(identity)
        except BlockingIOError:
            os.close(self._handle)
            raise InputError(f"{target}: another process is converting to it; wait for its end") from None
        except BaseException:
            if not state.st_size:
                self.path.unlink(missing_ok=True)
            os.close(self._handle)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, InputError) or (isinstance(error, DoesNotFit) and not self.written):
            self.forget()
        os.close(self._handle)

    def finished(self, name: str, written: Written) -> None:
        """The file `name` is complete and on disk."""
        state = (self.folder / name).stat()
        self._append({"file": name, "size": state.st_size, "mtime": state.st_mtime_ns, **written._asdict()})
        self.written[name] = written

    def publish(self, target: Path) -> None:
        """Give the directory its name, which it bears from now on, complete; then drop the journal."""
        for file in self.folder.iterdir():
            sync(file)
        sync(self.folder)
        os.rename(self.folder, target)
        sync(target.parent)
        self.path.unlink()

    def forget(self) -> None:
        """Remove all that was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.path.unlink(missing_ok=True)

    def _begin(self, identity: dict[str, Any]) -> None:
        lines = self._lines()
        if not lines:
            if self.folder.is_symlink() or self.folder.exists():
                self._check_empty()
                self.folder.rmdir()
            self.folder.mkdir()
            try:
                self._append(identity)
                sync(self.path.parent)
            except OSError:
                self.forget()
                raise
        elif lines[0] != identity:
            raise InputError(
                f"{self.folder}: holds an unfinished conversion {difference(lines[0], identity)}; finish that one, or "
                f"remove it and {self.path.name}"
            )
        self.folder.mkdir(exist_ok=True)
        for line in lines[1:]:
            file = self.folder / line["file"]
            if file.is_file() and (file.stat().st_size, file.stat().st_mtime_ns) == (line["size"], line["mtime"]):
                self.written[line["file"]] = Written(line["sha256"], line["rounded"])
        for file in self.folder.iterdir():
            if file.name not in self.written and file.suffix in _OWN and not self.folder.is_symlink():
                file.unlink()  # begun by a run that was killed: its room counts

    def _check_empty(self) -> None:
        """What lies there without a journal was not written by a conversion, so that it must not be removed."""
        if self.folder.is_symlink() or not self.folder.is_dir() or any(self.folder.iterdir()):
            raise InputError(
                f"{self.folder}: exists, and no journal says that a conversion wrote it; remove it, or name another "
                "directory"
            )

    def _lines(self) -> list[dict[str, Any]]:
        text = os.pread(self._handle, os.fstat(self._handle).st_size, 0)
        if not _is_journal(text):
            raise InputError(f"{self.path}: is no journal of a conversion; remove it, or name another directory")
        whole = text[: text.rfind(b"\n") + 1]  # a line that a kill cut short did not happen
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            if any(not line.keys() >= _LINE or type(line["rounded"]) is not int for line in lines[1:]) or not all(
                isinstance(line, dict) for line in lines
            ):
                raise ValueError
        except (ValueError, AttributeError, RecursionError):
            raise InputError(f"{self.path}: damaged; remove it and {self.folder.name} to start again") from None
        os.ftruncate(self._handle, len(whole))
        os.lseek(self._handle, len(whole), os.SEEK_SET)
        return lines

    def _append(self, line: dict[str, Any]) -> None:
        text = json.dumps(line).encode() + b"\n"
        while text:  # a disk that is nearly full takes a part
            text = text[os.write(self._handle, text) :]
        os.fsync(self._handle)
