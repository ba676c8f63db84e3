"""Is a directory this very conversion, whole: the record of it, and every file that belongs to it with its size."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from undertow.checkpoint.convert.documents import RECORD, SUMS, carried_files
from undertow.checkpoint.convert.identity import difference
from undertow.checkpoint.convert.layout import OutFile, index_of
from undertow.checkpoint.convert.source import SCALES, Source
from undertow.checkpoint.shards import INDEX
from undertow.config.errors import InputError
from undertow.config.reading import read_regular

_ROUNDED, _SCALES = "rounded", "scales"
_LARGEST = 1 << 26  # bytes of a record: a line for each file of the source


class Finished(NamedTuple):
    """What a conversion knows once it is finished: tensors with rounded numbers, and the SHA-256 of the kept scales.

    The scales are the one file that a user may delete, so that their sum is not in the list of sums.
    """

    rounded: int
    scales: str | None


def record_text(identity: Mapping[str, Any], finished: Finished) -> str:
    """The text of the record that a finished conversion has."""
    return json.dumps({**identity, _ROUNDED: finished.rounded, _SCALES: finished.scales}, indent=2) + "\n"


def sizes_of(source: Source, files: Sequence[OutFile], config: str) -> dict[str, int]:
    """Every file of the target beside its record and its sums, and its size in bytes; `config` is `config.json`."""
    texts = {INDEX: index_of(files), "config.json": config}
    carried = {file.name: file.stat().st_size for file in carried_files(source.directory)}
    return {
        **{file.name: file.size for file in files},
        **carried,
        **{name: len(text.encode()) for name, text in texts.items()},
    }


def finished_at(target: Path, identity: Mapping[str, Any], sizes: Mapping[str, int]) -> Finished | None:
    """What `target` says of itself if it holds this conversion, kept scales or not; None where there is nothing.

    Raises `InputError` if it holds anything else, or a part of it.
    """
    if not os.path.exists(target):
        if os.path.islink(target):
            raise InputError(f"{target}: is a loop of symbolic links; name a new directory")
        return None
    if not target.is_dir():
        raise InputError(f"{target}: is a file; a new directory is expected")
    try:
        if not os.listdir(target):
            return None
    except OSError as error:
        raise InputError(f"{target}: cannot be read ({error.strerror}); name a new directory") from None
    found, finished = _record(target)
    if found != identity:
        raise InputError(
            f"{target}: holds a conversion {difference(found, identity)}; give what it was made with, or name a new "
            "directory"
        )
    sizes = {**sizes, RECORD: len(record_text(identity, finished).encode())}
    for name in (*sizes, SUMS):
        file = target / name
        if name == SCALES and not os.path.lexists(file):
            continue
        if not file.is_file():
            raise InputError(f"{file}: is gone from the finished conversion; remove the directory and convert again")
        size = file.stat().st_size
        if size != sizes.get(name, size):
            raise InputError(
                f"{file}: has {size} bytes, the conversion wrote {sizes[name]}; remove the directory and convert again"
            )
    return finished


def _record(target: Path) -> tuple[dict[str, Any], Finished]:
    try:
        found = json.loads(read_regular(target / RECORD, _LARGEST))
        finished = Finished(found.pop(_ROUNDED), found.pop(_SCALES))
        if type(finished.rounded) is not int or not isinstance(finished.scales, str | None):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{target}: exists and is no finished conversion; name a new directory") from None
    return found, finished
