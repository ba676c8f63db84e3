"""What makes two conversions the same one, and what of it differs between two."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from undertow.checkpoint.convert.digest import file_digest, sampled_digest
from undertow.checkpoint.convert.documents import carried_files
from undertow.checkpoint.convert.layout import OutFile
from undertow.checkpoint.convert.source import Source
from undertow.checkpoint.convert.target import Wish

VERSION = "conversion"
"""Key of an identity that every record and journal of a conversion has."""

_VERSION = 2


def identity_of(source: Source, wish: Wish, files: Sequence[OutFile]) -> dict[str, Any]:
    """What the source's files hold, the wish, and every byte of the layout. A JSON object.

    Files count by name and content, large ones by header and sample. Neither the place of the source nor the times of
    its files count.
    """
    layout = hashlib.sha256()
    for file in files:
        layout.update(file.name.encode() + file.head)
    heads = {file: 0 for file in carried_files(source.directory)}
    for place in (*source.tensors.values(), *source.kept.values()):
        heads[place.file] = min(place.span.begin, heads.get(place.file, place.span.begin))
    return {
        VERSION: _VERSION,
        "wish": asdict(wish),
        "config": file_digest(source.directory / "config.json"),
        "source": {file.name: sampled_digest(file, heads[file]) for file in sorted(heads)},
        "layout": layout.hexdigest(),
    }


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """How the conversion `found` differs from the one that is asked for; follows "a conversion" in a sentence."""
    if found.get(VERSION) != wanted.get(VERSION):
        return "by another version of undertow"
    if any(found.get(key) != wanted.get(key) for key in ("source", "config")):
        return "of another source, or of this one before its files changed"
    if found.get("wish") != wanted.get("wish"):
        return f"with {_options(found.get('wish'))}, not {_options(wanted['wish'])}"
    return "with another --shard-bytes, which cut its files otherwise"


def _options(wish: Any) -> str:
    if not isinstance(wish, dict):
        return "other options"
    words = {"--to": wish.get("spelling"), "--dtype": wish.get("precision"), "--dialect": wish.get("dialect")}
    return " ".join(f"{option} {value}" for option, value in words.items() if value is not None)
