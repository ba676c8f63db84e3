"""What differs between two nodes, by what `undertow doctor --json` printed on each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from undertow.config.errors import InputError

# What is each node's own, or follows from the rest.
_OWN = {"node", "ipv4", "gid", "gids", "remarks", "reason", "ops"}


def read_facts(path: Path) -> dict[str, Any]:
    """What a doctor printed. Raises `InputError` for a file that holds none."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give what undertow doctor --json printed") from None
    if not isinstance(facts, dict) or not {"versions", "devices", "preflight"} <= facts.keys():
        raise InputError(f"{path}: is not of undertow doctor --json; give what that printed on the node")
    return facts


def differences(first: dict[str, Any], second: dict[str, Any], names: tuple[str, str]) -> list[str]:
    """A line for each value that is not the same on both, as `versions.torch: 2.11.0 on a, 2.13.0 on b`.

    Addresses and names of nodes may differ, and backends of operators follow from the rest: they do not count.
    """
    return list(_compared(first, second, names, ""))


def _compared(first: Any, second: Any, names: tuple[str, str], key: str) -> Iterator[str]:
    ours, theirs = _parts(first), _parts(second)
    if ours is None or theirs is None:
        if first != second:
            yield f"{key}: {_told(first)} on {names[0]}, {_told(second)} on {names[1]}"
        return
    for name in dict.fromkeys([*ours, *theirs]):
        below = f"{key}.{name}" if key else name
        if name in ours and name in theirs:
            yield from _compared(ours[name], theirs[name], names, below)
        else:
            yield f"{below}: on {names[name in theirs]} alone"


def _parts(value: Any) -> dict[str, Any] | None:
    """What a value is made of, by name; None for one that is whole."""
    if isinstance(value, dict):
        return {name: part for name, part in value.items() if name not in _OWN}
    if isinstance(value, list):
        return {_name(part, i): part for i, part in enumerate(value)}
    return None


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _name(entry: Any, place: int) -> str:
    """What tells an entry of a list from the others."""
    if not isinstance(entry, dict):
        return str(place)
    name = str(entry.get("device", entry.get("name", place)))
    return f"{name}:{entry['port']}" if "port" in entry else name
