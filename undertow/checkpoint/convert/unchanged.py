"""Has a source stayed as it was while it was read, and can all of it be read: told by the states of its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from undertow.checkpoint.convert.documents import carried_files
from undertow.checkpoint.convert.source import Source
from undertow.checkpoint.header import open_regular
from undertow.checkpoint.shards import INDEX
from undertow.config.errors import InputError


class State(NamedTuple):
    """Size in bytes, and when the content last changed, in nanoseconds."""

    size: int
    changed: int


def states_of(directory: Path) -> dict[str, State]:
    """The state of everything that lies in `directory`, by name; what a broken link leads to has none."""
    found = {}
    for name in os.listdir(directory):
        try:
            state = os.stat(directory / name)
        except OSError:
            continue
        found[name] = State(state.st_size, state.st_mtime_ns)
    return found


def check_unchanged(source: Source, before: dict[str, State]) -> None:
    """Raise `InputError` that names the first file of `source` whose state is no longer the one of `before`."""
    after = states_of(source.directory)
    read = {"config.json", INDEX, *(file.name for file in (*source.files(), *carried_files(source.directory)))}
    for name in sorted(read):
        if after.get(name) != before.get(name):
            raise changed(source.directory / name)


def changed(path: Path) -> InputError:
    """The error for a file or a directory that changed."""
    return InputError(
        f"{path}: changed while it was read, so that the result would be of two models; convert again once nothing "
        "writes to it"
    )


def check_carried(directory: Path) -> None:
    """Raise `InputError` for a file that a conversion copies where it cannot be read, or named in `SHA256SUMS`."""
    for file in carried_files(directory):
        os.close(open_regular(file))
        try:
            file.name.encode()
        except UnicodeEncodeError:
            raise InputError(f"{file}: its name is no text in UTF-8, as lists of sums are; rename it") from None
