"""A resolved configuration as text: YAML that can be used as a recipe again, JSON, and the difference of two."""

from __future__ import annotations

import json
from typing import Any

from undertow.config.layer import flat
from undertow.config.optimizations import unbuilt
from undertow.config.resolve import Resolved
from undertow.config.scalars import shown

_COMMENT_COLUMN = 44


def values_of(resolved: Resolved) -> dict[str, Any]:
    """Every dotted key with its value; lists are lists, as JSON has them."""
    values = json.loads(resolved.config.model_dump_json())
    if resolved.preset is not None:
        values["model"] = {"preset": resolved.preset, **values["model"]}
    return flat(values)


def to_yaml(resolved: Resolved) -> str:
    """The configuration as a recipe, a comment behind each value naming its source."""
    lines: list[str] = []
    open_sections: list[str] = []
    for key, value in values_of(resolved).items():
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
        open_sections = sections
        # A text may hold "${", which a recipe would take for a variable.
        line = f"{'  ' * len(sections)}{name}: {shown(value).replace('${', '$${')}"
        lines.append(f"{line:<{_COMMENT_COLUMN}}  # {resolved.sources[key]}")
    for family, conditions in unbuilt(resolved.config.optimizations).items():
        lines.append(f"# optimizations.{family} is on but not built yet: a launch refuses it. It needs {conditions}.")
    return "\n".join(lines) + "\n"


def to_json(resolved: Resolved) -> str:
    """One JSON object: dotted key to `{"value": ..., "source": ...}`."""
    entries = {key: {"value": value, "source": resolved.sources[key]} for key, value in values_of(resolved).items()}
    return json.dumps(entries, indent=2, ensure_ascii=False) + "\n"


def differences(left: Resolved, right: Resolved) -> dict[str, dict[str, Any]]:
    """Keys whose values differ, each with both values and sources; a key that one side lacks is `None` there."""
    sides = {"left": (left, values_of(left)), "right": (right, values_of(right))}
    (_, a), (_, b) = sides.values()
    return {
        key: {
            side: {"value": values[key], "source": resolved.sources[key]} if key in values else None
            for side, (resolved, values) in sides.items()
        }
        for key in a | b
        if key not in a or key not in b or a[key] != b[key]
    }


def diff_text(left: Resolved, right: Resolved) -> str:
    """One line per differing key: key, left value, right value, and both sources; nothing if there is no difference."""
    lines = []
    for key, sides in differences(left, right).items():
        told = [f"{shown(side['value'])} ({side['source']})" if side else "-" for side in sides.values()]
        lines.append(f"{key}: {told[0]} -> {told[1]}\n")
    return "".join(lines)


def diff_json(left: Resolved, right: Resolved) -> str:
    """`differences` as one JSON object."""
    return json.dumps(differences(left, right), indent=2, ensure_ascii=False) + "\n"
