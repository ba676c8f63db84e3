"""The fixed texts of the format. The model was trained on them: each byte counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from undertow.config.errors import InputError
from undertow.data.chat.markers import ANSWER, DSML, THINK

UTMOST_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
"""Stands before everything else where the effort is max."""

BEFORE_TOOLS = f"""

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{ANSWER} \
BEFORE any tool calls or final response.

Otherwise, output directly after {ANSWER} with tool calls or final response.

### Available Tool Schemas

"""
"""Stands before the descriptions of the tools, and holds markers."""

AFTER_TOOLS = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

BEFORE_FORMAT = """

## Response Format:

You MUST strictly adhere to the following schema to reply:
"""


def tool_schemas(tools: Iterable[Mapping[str, Any]]) -> str:
    """One line of JSON for each tool."""
    return "\n".join(as_json(tool) for tool in tools)


def as_json(value: Any) -> str:
    """JSON as the format writes it: a blank after commas and colons, letters beyond ASCII as themselves.

    Raises `InputError` for what JSON does not have, or is too deep.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"a value cannot be written as JSON ({error}); give strings, numbers, lists and objects"
        ) from None


def tool_result(content: str) -> str:
    """A tool's answer as it stands in a user turn. These tags are plain text, in the released model too."""
    return f"<tool_result>{content}</tool_result>"
