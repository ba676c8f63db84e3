"""What each role says: text, reasoning, tool calls and their results, and the tools that may be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")


@dataclass(frozen=True)
class ToolCall:
    """A call of the function `name`; `arguments` is the text of a JSON object; a result names the call by its `id`."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """What `role`, one of `ROLES`, says.

    Of an assistant: `reasoning` before the content, `calls` after it, and `prefix` where the model is to go on with the
    message (no end token follows). Of a tool: `call_id`, the call that the content answers. Of system and developer:
    `tools`, JSON objects that describe one function each (`name`, `description`, `parameters`), and `response_format`,
    the schema that answers must keep to. `task`, a name of `TASKS`, asks for a quick task.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Any = None
    task: str | None = None
    prefix: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """All that this role itself says, in order."""
        return (self.reasoning, self.content, *(text for call in self.calls for text in (call.name, call.arguments)))


def with_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], response_format: Any = None
) -> tuple[Message, ...]:
    """`messages` with a request's tools and response format, on the system message that is first or gets put there."""
    if not tools and not response_format:
        return tuple(messages)
    first, *rest = messages if messages and messages[0].role == "system" else (Message("system"), *messages)
    schema = response_format or first.response_format
    return (replace(first, tools=(*first.tools, *tools), response_format=schema), *rest)
