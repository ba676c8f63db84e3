"""SHA-256 of a file while it is written: a thread follows the part that is complete."""

from __future__ import annotations

import hashlib
import os
import threading
from types import TracebackType

from undertow.config.errors import UndertowError

_CHUNK = 1 << 22


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


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
