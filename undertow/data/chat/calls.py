"""Tool calls as the model writes them: tags that hold `｜DSML｜`, strings raw, all other values in JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from undertow.config.errors import InputError
from undertow.data.chat.markers import DSML
from undertow.data.chat.message import ToolCall
from undertow.data.chat.wording import as_json

BLOCK, INVOKE, PARAMETER = "tool_calls", "invoke", "parameter"


def call_block(calls: Sequence[ToolCall]) -> list[tuple[str, bool]]:
    """The block of `calls`: texts, and whether each belongs to the format, so that markers in it are tokens.

    Names and values stand as they are, without any escapes. Arguments that are no JSON become one string parameter
    `arguments`. Raises `InputError` for JSON that is no object.
    """
    parts = [(f"\n\n<{DSML}{BLOCK}>", True)]
    for call in calls:
        parts += [(f'\n<{DSML}{INVOKE} name="', True), (call.name, False), ('">\n', True)]
        for number, (name, value, string) in enumerate(_parameters(call)):
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
        values = json.loads(call.arguments)
        if isinstance(values, dict):
            return [
                (name, value, True) if isinstance(value, str) else (name, as_json(value), False)
                for name, value in values.items()
            ]
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        return [("arguments", call.arguments, True)]
    raise InputError(
        f"the call of '{call.name}' has the arguments {call.arguments[:40]}; they must be the text of a JSON object"
    )
