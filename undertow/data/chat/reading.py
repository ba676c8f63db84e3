"""Messages from plain values, in the form that chat completions and data sets share."""

from __future__ import annotations

import json
from typing import Any

from undertow.config.errors import InputError
from undertow.data.chat.calls import call_block
from undertow.data.chat.markers import TASKS
from undertow.data.chat.message import ROLES, Message, ToolCall
from undertow.data.chat.wording import as_json
from undertow.data.corpus import check_unicode

_KEYS = {"role", "content", "task"}
_ROLE_KEYS = {
    "assistant": {"reasoning_content", "reasoning", "tool_calls", "prefix"},
    "tool": {"tool_call_id", "name"},
    "system": {"tools", "response_format"},
    "developer": {"tools", "response_format"},
}


def read_messages(values: Any, where: str) -> tuple[Message, ...]:
    """The messages that a list of objects describes, as chat completions take them.

    Keys: `role` and `content` (a text or a list of text parts, which a blank line joins); of an assistant also
    `reasoning_content` (or `reasoning`), `tool_calls` and `prefix`; of a tool `tool_call_id`; of system and developer
    `tools` and `response_format`; `task` as in `Message`. Keys with empty values count as absent; others, `name` of a
    user among them, are refused. Raises `InputError` that begins with `where` and names the message, and the call whose
    names or arguments the format cannot write.
    """
    if not isinstance(values, list | tuple) or not values:
        raise InputError(f"{where}: 'messages' must be a list of at least one {{role, content}}")
    return tuple(_message(value, f"{where}: message {number}") for number, value in enumerate(values, 1))


def read_tools(values: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Descriptions of functions from a list of {type: function, function: {...}}, or from its text in JSON."""
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except (ValueError, RecursionError):
            raise InputError(f"{where}: 'tools' is a text but no JSON: {values[:40]!r}") from None
    tools = []
    for number, value in enumerate(values if isinstance(values, list | tuple) else [None], 1):
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wanted = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise InputError(f"{where}: tool {number} must be {wanted}, it is {_told(value)}")
        tools.append(function)
    return tuple(tools)


def text_of_value(value: Any, what: str) -> str:
    """A text, or the texts of a list of {type: text, text: ...} with a blank line between them."""
    if isinstance(value, list | tuple) and value:
        for number, part in enumerate(value, 1):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InputError(f"{what}: part {number} is no {{type: text, text: ...}}; the model reads text alone")
        value = "\n\n".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise InputError(f"{what} must be a string, it is {_told(value)}")
    check_unicode(value, what)
    return value


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise InputError(f"{where} must be an object with 'role' and 'content'")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(f"{where} has the role {role!r}; allowed: {', '.join(ROLES)}")
    given = {key: each for key, each in value.items() if each not in (None, [], {}, "", False)}
    unknown = given.keys() - _KEYS - _ROLE_KEYS.get(role, set())
    if unknown:
        raise InputError(
            f"{where} has '{min(map(str, unknown))}', which this chat format does not carry for the role {role}"
        )
    if given.get("reasoning") and given.get("reasoning_content", given["reasoning"]) != given["reasoning"]:
        raise InputError(f"{where} has both 'reasoning' and 'reasoning_content', and they differ; leave one out")
    task = _identity(given.get("task"), f"{where}'s task")
    if task is not None and task not in TASKS:
        raise InputError(f"{where} has the task {task!r}; allowed: {', '.join(TASKS)}")
    content = value.get("content")
    silent = content is None and role == "assistant"
    return Message(
        role=role,
        content="" if silent else text_of_value(content, f"{where}'s content"),
        reasoning=text_of_value(given.get("reasoning_content", given.get("reasoning", "")), f"{where}'s reasoning"),
        calls=_calls(given.get("tool_calls", ()), where),
        call_id=_identity(given.get("tool_call_id"), f"{where}'s tool_call_id"),
        tools=read_tools(given.get("tools", ()), where),
        response_format=given.get("response_format"),
        task=task,
        prefix=bool(given.get("prefix")),
    )


def _calls(values: Any, where: str) -> tuple[ToolCall, ...]:
    return tuple(
        _call(value, f"{where}'s tool call {number}")
        for number, value in enumerate(values if isinstance(values, list | tuple) else [values], 1)
    )


def _call(value: Any, what: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        wanted = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
        raise InputError(f"{what} must be {wanted}, it is {_told(value)}")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        try:
            arguments = as_json(arguments)
        except InputError as error:
            raise InputError(f"{what}'s arguments: {error}") from None
    call = ToolCall(
        text_of_value(function["name"], f"{what}'s name"),
        text_of_value(arguments, f"{what}'s arguments"),
        _identity(value.get("id"), f"{what}'s id"),
    )
    try:
        call_block([call])
    except InputError as error:
        raise InputError(f"{what}: {error}") from None
    return call


def _identity(value: Any, what: str) -> str | None:
    return None if value is None else text_of_value(value, what)


def _told(value: Any) -> str:
    return "missing" if value is None else "another object" if isinstance(value, dict) else f"a {type(value).__name__}"
