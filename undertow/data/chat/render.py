"""Messages to the pieces of a prompt: markers, and text in which nothing is a marker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from undertow.config.errors import InputError
from undertow.data.chat.calls import call_block
from undertow.data.chat.markers import ANSWER, ASSISTANT, REMINDER, SPELLED, TASKS, THINK, USER
from undertow.data.chat.message import ROLES, Message
from undertow.data.chat.turns import last_question, user_turns, without_old_reasoning
from undertow.data.chat.wording import AFTER_TOOLS, BEFORE_FORMAT, BEFORE_TOOLS, UTMOST_EFFORT, as_json, tool_schemas
from undertow.data.tokenizer import BOS, EOS

Effort = Literal["none", "high", "max"]
"""none: answers without reasoning; high: reasoning; max: reasoning, which a paragraph before everything asks for."""


@dataclass(frozen=True)
class Piece:
    """A marker or a text, and whether a model learns to say it: what an assistant says, and the end token after it."""

    text: str
    marker: bool = False
    learned: bool = False


def render(messages: Sequence[Message], effort: Effort = "none", keep_reasoning: bool = False) -> list[Piece]:
    """The pieces of a conversation. One for which `opens_answer` is true ends where the model is to begin.

    With reasoning, that of the turns before the last question is dropped, and all that a developer said there, unless
    a message has tools or `keep_reasoning`. A task is asked for where an assistant, a latest_reminder or nothing
    follows. Raises `InputError` for an unknown role, task or effort, tools on another role than system and developer,
    an empty developer message, and arguments that are no JSON object.
    """
    _check(messages, effort)
    thinking = effort != "none"
    turns = user_turns(messages)
    keep = keep_reasoning or any(turn.tools for turn in turns)
    if thinking and not keep:
        turns = without_old_reasoning(turns)
    last = last_question(turns)
    pieces = [Piece(BOS, marker=True)]
    if effort == "max" and turns:
        pieces.append(Piece(UTMOST_EFFORT))
    for place, turn in enumerate(turns):
        reasoned = thinking and (keep or place > last) and not (place and turns[place - 1].task)
        pieces += _turn(turn, reasoned)
        following = turns[place + 1].role if place + 1 < len(turns) else None
        if following in (None, "assistant", "latest_reminder"):
            reasons = thinking and (keep or place >= last or turn.task == "action")
            pieces += [Piece(marker, marker=True) for marker in _transition(turn, THINK if reasons else ANSWER)]
    return [piece for piece in pieces if piece.text]


def opens_answer(messages: Sequence[Message]) -> bool:
    """Whether the prompt of `messages` ends where an answer begins.

    So it does after user, tool and developer, after any message with a task, and in an assistant's `prefix`. After
    others the released format opens none, and a model that goes on there continues what they say.
    """
    last = messages[-1] if messages else Message("system")
    return last.role in ("user", "tool", "developer") or last.task is not None or last.prefix


def text_of(pieces: Iterable[Piece]) -> str:
    """The prompt as one text. Its markers cannot be told from text that spells one: encode the pieces instead."""
    return "".join(piece.text for piece in pieces)


def _turn(turn: Message, reasoned: bool) -> list[Piece]:
    """A turn itself; `reasoned`: an assistant's reasoning and its end are written."""
    if turn.role == "assistant":
        learned = not turn.prefix
        before = [Piece(turn.reasoning, False, learned), Piece(ANSWER, True, learned)] if reasoned else []
        block = [
            piece
            for text, fixed in (call_block(turn.calls) if turn.calls else [])
            for piece in (_fixed(text, learned) if fixed else [Piece(text, False, learned)])
        ]
        end = [] if turn.prefix else [Piece(EOS, True, True)]
        return [*before, Piece(turn.content, False, learned), *block, *end]
    opening = {"user": [USER], "developer": [USER], "latest_reminder": [REMINDER]}.get(turn.role, [])
    pieces = [*(Piece(marker, marker=True) for marker in opening), Piece(turn.content)]
    if turn.tools:
        pieces += [*_fixed(BEFORE_TOOLS), Piece(tool_schemas(turn.tools) + AFTER_TOOLS)]
    if turn.response_format:
        pieces.append(Piece(BEFORE_FORMAT + as_json(turn.response_format)))
    return pieces


def _transition(turn: Message, opening: str) -> tuple[str, ...]:
    """The markers between a turn and the assistant's."""
    if turn.task == "action":
        return ASSISTANT, opening, TASKS[turn.task]
    if turn.task:
        return (TASKS[turn.task],)
    return (ASSISTANT, opening) if turn.role in ("user", "developer") else ()


def _fixed(text: str, learned: bool = False) -> list[Piece]:
    """Text of the format itself, in which what spells a marker is one."""
    pieces, at = [], 0
    for found in SPELLED.finditer(text):
        pieces += [Piece(text[at : found.start()], False, learned), Piece(found.group(), True, learned)]
        at = found.end()
    return [*pieces, Piece(text[at:], False, learned)]


def _check(messages: Sequence[Message], effort: Effort) -> None:
    if effort not in get_args(Effort):
        raise InputError(f"effort {effort!r} is unknown; allowed: {', '.join(get_args(Effort))}")
    for number, message in enumerate(messages, 1):
        if message.role not in ROLES:
            raise InputError(f"message {number} has the role {message.role!r}; allowed: {', '.join(ROLES)}")
        if message.task is not None and message.task not in TASKS:
            raise InputError(f"message {number} has the task {message.task!r}; allowed: {', '.join(TASKS)}")
        if message.role not in ("system", "developer") and (message.tools or message.response_format):
            given = "tools" if message.tools else "a response_format"
            raise InputError(
                f"message {number} of the role {message.role} has {given}; the roles system and developer can have it: "
                "move it to the system message"
            )
        if message.role == "developer" and not message.content:
            raise InputError(f"message {number} of the role developer is empty; give it a text or leave it out")
