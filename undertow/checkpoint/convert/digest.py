"""SHA-256 of a file: while it is written, where a thread follows the part that is complete, of all, or of a sample."""

from __future__ import annotations

import hashlib
import os
import threading
from types import TracebackType

from undertow.config.errors import UndertowError

_CHUNK = 1 << 22
_WHOLE = 1 << 24  # bytes of the largest file that is summed up whole where a sample will do
_PIECE, _PLACES = 1 << 12, 256


class Digest:
    """Hashes the first `upto` bytes of an open file, as far as `advance` says they are final. A context manager."""

    def __init__(self, handle: int):
        self._handle, self._final, self._closed = handle, 0, False
        self._hash = hashlib.sha256()
        self._changed = threading.Condition()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._follow, name="digest", daemon=True)
        self._thread.start()

    def __enter__(self) -> Digest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def advance(self, upto: int) -> None:
        """The bytes before `upto` will not change any more."""
        with self._changed:
            self._final = max(self._final, upto)
            self._changed.notify()

    def hexdigest(self) -> str:
        """The sum of all bytes up to the last `advance`, once they are read."""
        self._close()
        if self._error is not None:
            raise UndertowError(f"a written file cannot be read again ({self._error})") from self._error
        return self._hash.hexdigest()

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _follow(self) -> None:
        at, buffer = 0, bytearray(_CHUNK)
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=at: self._final >= at + _CHUNK or self._closed)
                final = self._final
                if at >= final:
                    return
            try:
                count = os.preadv(self._handle, [memoryview(buffer)[: min(_CHUNK, final - at)]], at)
                if not count:
                    raise OSError(f"it ends at byte {at}, {final} were written")
            except OSError as error:
                self._error = error
                return
            self._hash.update(memoryview(buffer)[:count])
            at += count


def sampled_digest(path: str | os.PathLike[str], head: int = 0) -> str:
    """SHA-256 of a file of up to 16 MiB, in hexadecimal.

    Of a larger one: of its size, its first `head` bytes, and 4 KiB at each of 256 places spread evenly over it.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256(b"%d" % size + file.read(head))
        for place in range(_PLACES):
            found.update(os.pread(file.fileno(), _PIECE, place * (size - _PIECE) // (_PLACES - 1)))
    return found.hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
