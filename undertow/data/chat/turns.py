"""Messages as turns: tool results join the user's turn, and what lies behind the last question loses its reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from undertow.data.chat.message import Message
from undertow.data.chat.wording import tool_result


def user_turns(messages: Sequence[Message]) -> list[Message]:
    """The messages, each run of user and tool messages made one of the user, its parts a blank line apart.

    Results stand in the order of the calls of the last assistant that called, and take no other places than results
    had; one whose call is not known counts as an answer to the first. A user message with a task takes no more user
    text into its turn; a task of a message that is not the first of its turn, or a tool's, is passed over.
    """
    turns: list[Message] = []
    run: list[Message] = []
    order: dict[str, int] = {}
    for message in messages:
        if message.role == "tool" or (message.role == "user" and not _task(run)):
            run.append(message)
            continue
        if run:
            turns.append(_joined(run, order))
        run = [message] if message.role == "user" else []
        if not run:
            turns.append(message)
        if message.calls:
            order = {call.id: place for place, call in enumerate(message.calls) if call.id}
    return [*turns, _joined(run, order)] if run else turns


def last_question(turns: Sequence[Message]) -> int:
    """The place of the last turn of a user or developer; -1 without any."""
    return max((place for place, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def without_old_reasoning(turns: Sequence[Message]) -> list[Message]:
    """The turns without what is dropped before the last question: reasoning, and all that a developer says."""
    last = last_question(turns)
    return [
        replace(turn, reasoning="") if place < last else turn
        for place, turn in enumerate(turns)
        if place >= last or turn.role != "developer"
    ]


def _joined(run: Sequence[Message], order: dict[str, int]) -> Message:
    results = iter(
        sorted((each for each in run if each.role == "tool"), key=lambda result: order.get(result.call_id or "", 0))
    )
    parts = [tool_result(next(results).content) if each.role == "tool" else each.content for each in run]
    return Message("user", "\n\n".join(parts), task=_task(run))


def _task(run: Sequence[Message]) -> str | None:
    return run[0].task if run and run[0].role == "user" else None
