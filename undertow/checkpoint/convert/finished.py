"""Is a directory this very conversion, whole: the record of it, and every file that belongs to it with its size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undertow.checkpoint.convert.documents import RECORD, SUMS, carried_files
from undertow.checkpoint.convert.layout import OutFile, index_of
from undertow.checkpoint.convert.source import Source
from undertow.checkpoint.shards import INDEX
from undertow.config.errors import InputError


def record_text(identity: Mapping[str, Any]) -> str:
    """The text of the record that a finished conversion has."""
    return json.dumps(identity, indent=2) + "\n"


def sizes_of(source: Source, files: Sequence[OutFile], config: str, identity: Mapping[str, Any]) -> dict[str, int]:
    """Every file of the target that `SHA256SUMS` lists, and its size in bytes; `config` is that of `config.json`."""
    texts = {INDEX: index_of(files), "config.json": config, RECORD: record_text(identity)}
    carried = {file.name: file.stat().st_size for file in carried_files(source.directory)}
    return {
        **{file.name: file.size for file in files},
        **carried,
        **{name: len(text.encode()) for name, text in texts.items()},
    }


def is_complete(target: Path, identity: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    """Whether `target` holds this conversion. Raises `InputError` if it holds anything else, or a part of it."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise InputError(f"{target}: is a file; a new directory is expected")
    if not any(target.iterdir()):
        return False
    try:
        same = json.loads((target / RECORD).read_text("utf-8")) == identity
    except (OSError, ValueError, RecursionError):
        raise InputError(f"{target}: exists and is no finished conversion; name a new directory") from None
    if not same:
        raise InputError(f"{target}: holds a conversion of another source or to another format; name a new directory")
    for name in (*sizes, SUMS):
        file = target / name
        if not file.is_file():
            raise InputError(f"{file}: is gone from the finished conversion; remove the directory and convert again")
        size = file.stat().st_size
        if size != sizes.get(name, size):
            raise InputError(
                f"{file}: has {size} bytes, the conversion wrote {sizes[name]}; remove the directory and convert again"
            )
    return True
