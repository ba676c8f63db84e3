"""Tool calls as the model writes them: tags that hold `｜DSML｜`, strings raw, all other values in JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from undertow.config.errors import InputError
from undertow.data.chat.markers import DSML
from undertow.data.chat.message import ToolCall
from undertow.data.chat.tags import LONGEST_NAME
from undertow.data.chat.wording import as_json

BLOCK, INVOKE, PARAMETER = "tool_calls", "invoke", "parameter"


def call_block(calls: Sequence[ToolCall]) -> list[tuple[str, bool]]:
    """The block of `calls`: texts, and whether each belongs to the format, so that markers in it are tokens.

    Names and values stand as they are, without any escapes. Arguments that are no JSON become one string parameter
    `arguments`; NaN, infinity, a key twice and half a pair of surrogates are none. Raises `InputError` for JSON that
    is no object, and for a name that the tags cannot hold.
    """
    parts = [(f"\n\n<{DSML}{BLOCK}>", True)]
    for call in calls:
        _check_name(call.name, "function", call)
        parts += [(f'\n<{DSML}{INVOKE} name="', True), (call.name, False), ('">\n', True)]
        for number, (name, value, string) in enumerate(_parameters(call)):
            _check_name(name, "parameter", call)
            parts += [
                (("\n" if number else "") + f'<{DSML}{PARAMETER} name="', True),
                (name, False),
                (f'" string="{"true" if string else "false"}">', True),
                (value, False),
                (f"</{DSML}{PARAMETER}>", True),
            ]
        parts.append((f"\n</{DSML}{INVOKE}>", True))
    return [*parts, (f"\n</{DSML}{BLOCK}>", True)]


def _parameters(call: ToolCall) -> list[tuple[str, str, bool]]:
    """Name, text and whether it is a string, of each argument."""
    try:
        values = json.loads(call.arguments, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique)
        as_json(values).encode()  # an escaped half of a pair of surrogates is no text
        if isinstance(values, dict):
            return [
                (name, value, True) if isinstance(value, str) else (name, as_json(value), False)
                for name, value in values.items()
            ]
    except (ValueError, RecursionError, InputError):  # a number of thousands of digits, thousands of brackets
        return [("arguments", call.arguments, True)]
    raise InputError(
        f"the call of '{call.name}' has the arguments {call.arguments[:40]}; they must be the text of a JSON object"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key twice, of which one would be lost")
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number


def _check_name(name: str, kind: str, call: ToolCall) -> None:
    """Names stand in their tags without escapes, so that these would end the tag early or not be read again."""
    faults = {
        "a line break": "\n" in name,
        '">': '">' in name,
        f"{len(name)} characters": len(name) > LONGEST_NAME,
    }
    for fault, found in faults.items():
        if found:
            raise InputError(
                f"the call of {call.name[:40]!r} has the {kind} name {name[:40]!r} with {fault}; a name has at most "
                f'{LONGEST_NAME} characters, no line break and no ">'
            )
