"""A file system of a few megabytes, so that a disk is really full: a tmpfs that only a child process sees."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

PAGE = 4096
_MOUNT = 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"'


@cache
def _private() -> list[str] | None:
    """The command that gives a child mounts of its own: as root, or in a user namespace; None where neither may."""
    for command in (["unshare", "-m"], ["unshare", "-Urm"]):
        try:
            probe = subprocess.run([*command, "sh", "-c", _MOUNT, "sh", "64k", "/tmp", "true"], capture_output=True)
        except OSError:
            continue
        if probe.returncode == 0:
            return command
    return None


def possible() -> bool:
    """Whether this system lets a process mount a tmpfs for itself."""
    return _private() is not None


def on_small_disk(module: str, place: Path, size: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m module place *arguments` with a tmpfs of `size` at `place`."""
    private = _private()
    assert private is not None
    command = [sys.executable, "-m", module, str(place), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [*private, "sh", "-c", _MOUNT, "sh", size, str(place), *command]
    return subprocess.run(words, capture_output=True, text=True, env=environment)


class Ballast:
    """A file that takes all the room of a file system but for as many pages as wanted."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def leave(self, pages: int) -> None:
        """Make or remove room, so that `pages` pages are free."""
        self.drop()
        state = os.statvfs(self._path.parent)
        room = state.f_bavail * state.f_frsize - pages * PAGE
        assert room >= 0, "the file system is too small for this test"
        with self._path.open("wb") as file:
            file.write(bytes(room))
        state = os.statvfs(self._path.parent)
        assert state.f_bavail * state.f_frsize == pages * PAGE

    def drop(self) -> None:
        """Give the room back."""
        self._path.unlink(missing_ok=True)
