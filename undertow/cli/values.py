"""Plain values as JSON text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def json_pieces(values: Any) -> Iterator[str]:
    """The text of `json.dumps` with an indent of 2 and a last line break, in pieces. What stands in a list many times
    in a row, as GPUs that are alike, is spelt once, so that a million of them take little time and memory."""
    yield from _pieces(values, "\n")
    yield "\n"


def _pieces(value: Any, margin: str) -> Iterator[str]:
    if not value or not isinstance(value, dict | list):
        yield json.dumps(value)
        return
    inner = f"{margin}  "
    if isinstance(value, dict):
        for n, (key, each) in enumerate(value.items()):
            yield f"{',' if n else '{'}{inner}{json.dumps(key)}: "
            yield from _pieces(each, inner)
        yield f"{margin}}}"
        return
    last, text = None, ""
    for n, each in enumerate(value):
        if not n or each is not last:
            last, text = each, "".join(_pieces(each, inner))
        yield f"{',' if n else '['}{inner}{text}"
    yield f"{margin}]"
