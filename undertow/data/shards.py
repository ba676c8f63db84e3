"""Writing prepared shards: a new directory that appears whole or not at all, filled document by document."""

from __future__ import annotations

import fcntl
import os
import shutil
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from undertow.config.errors import InputError, UndertowError
from undertow.data.encoding import Example
from undertow.data.manifest import FileFacts, ShardFacts
from undertow.data.store import token_dtype


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory beside `target` to fill, which gets its name once all in it is on disk.

    Whatever a killed process left of an earlier attempt is removed. Raises `InputError` for a target that exists,
    cannot be made or is being made by another process, and `UndertowError` where writing fails. Nothing is left then.
    """
    if target.name in ("", ".."):
        raise InputError(f"{target}: is not the name of a new directory; give one")
    if os.path.lexists(target):
        raise InputError(f"{target}: exists already; name a new directory, or remove this one")
    fresh = target.with_name(f".{target.name}.writing")
    lock_file = fresh.with_name(f"{fresh.name}.lock")
    lock = _claimed(lock_file, target)
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        yield fresh
        for path in (*fresh.rglob("*"), fresh):
            sync(path)
        os.rename(fresh, target)
        sync(target.parent)
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(fresh)):
            raise  # of the corpus
        raise UndertowError(f"{target}: cannot be written ({error.strerror}); nothing of it is kept") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        lock_file.unlink(missing_ok=True)
        os.close(lock)


class ShardWriter:
    """Writes documents to `shard-00000`, `shard-00001` and so on; a shard ends with the document that fills it.

    Use it in a `with` block, whose end without an error completes the last shard.
    """

    def __init__(self, directory: Path, vocab_size: int, masked: bool, shard_tokens: int) -> None:
        """`masked` shards keep which tokens are learned; a shard holds about `shard_tokens` tokens."""
        self.shards: list[ShardFacts] = []
        self.dtype = token_dtype(vocab_size)
        self._directory, self._kinds = directory, ("tokens", "learned") if masked else ("tokens",)
        self._limit, self._offsets = shard_tokens, array("q", [0])
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._end_shard()
        for file in self._files.values():  # of a shard that is given up
            with suppress(OSError):
                file.close()

    def add(self, example: Example) -> None:
        """Write one document."""
        if not self._files:
            self._files = {kind: self._path(kind).open("wb") for kind in self._kinds}
        self._files["tokens"].write(example.ids.astype(self.dtype).tobytes())
        if example.learned is not None:
            self._files["learned"].write(example.learned.tobytes())
        self._offsets.append(self._offsets[-1] + len(example.ids))
        if self._offsets[-1] >= self._limit:
            self._end_shard()

    def _end_shard(self) -> None:
        if not self._files:
            return
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        write_synced(self._path("offsets"), np.array(self._offsets, dtype="<i8").tobytes())
        files = {kind: FileFacts.of(self._path(kind)) for kind in ("offsets", *self._kinds)}
        self.shards.append(
            ShardFacts(
                name=self._name,
                documents=len(self._offsets) - 1,
                tokens=self._offsets[-1],
                files=files,  # type: ignore[arg-type]
            )
        )
        self._files, self._offsets = {}, array("q", [0])

    @property
    def _name(self) -> str:
        return f"shard-{len(self.shards):05}"

    def _path(self, kind: str) -> Path:
        return self._directory / f"{self._name}.{kind}"


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file or the entries of a directory are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _claimed(lock_file: Path, target: Path) -> int:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(lock_file, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise InputError(f"{target}: cannot be made ({error.strerror})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise InputError(f"{target}: another process is preparing it; wait for it, or name another directory") from None
    return lock
