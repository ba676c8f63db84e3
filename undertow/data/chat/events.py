"""What a parsed answer consists of, event by event, and how events make a message again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from undertow.data.chat.message import Message, ToolCall


@dataclass(frozen=True)
class Reasoning:
    """The next part of the reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """The next part of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The tool call number `index`, from 0, of the function `name` begins."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next part of the arguments of the call `index`: all parts of a call that ended are a JSON object.

    A value that the model marked as JSON stands as it was written, so that one that is no JSON leaves none.
    """

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call `index` is complete."""

    index: int


@dataclass(frozen=True)
class End:
    """The answer ended after `calls` complete calls.

    `whole` is false where the reasoning, a call or the block of calls was still open. It says nothing of content, which
    has no end of its own: an answer that ran out of tokens within it is whole too, and only the reason for which
    sampling ended (`Completion.finish_reason`) tells the two apart.
    """

    calls: int
    whole: bool


Event = Reasoning | Content | CallStart | CallArguments | CallEnd | End


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with neighbouring parts of one text made one: the same however the answer was fed."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        # Of arguments the index is the same: a call starts between those of two.
        if isinstance(event, Reasoning | Content | CallArguments) and isinstance(last, type(event)):
            found[-1] = replace(last, text=last.text + event.text)
        else:
            found.append(event)
    return found


def message_of(events: Iterable[Event]) -> Message:
    """The assistant's message that `events` tell. Calls that did not end are left out."""
    events = list(events)
    ended = {event.index for event in events if isinstance(event, CallEnd)}
    arguments = {index: "" for index in ended}
    for event in events:
        if isinstance(event, CallArguments) and event.index in ended:
            arguments[event.index] += event.text
    return Message(
        "assistant",
        "".join(event.text for event in events if isinstance(event, Content)),
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        tuple(
            ToolCall(event.name, arguments[event.index])
            for event in events
            if isinstance(event, CallStart) and event.index in ended
        ),
    )
