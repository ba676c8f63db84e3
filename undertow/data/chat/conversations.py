"""Conversations of a data set: which records are ones, and their tokens, of which what assistants say is learned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from undertow.config.errors import InputError
from undertow.data.chat.message import Message, with_tools
from undertow.data.chat.reading import read_messages, read_tools
from undertow.data.chat.render import Effort, render, text_of
from undertow.data.chat.tokens import encode_pieces
from undertow.data.corpus import SHIPPED, check_unicode
from undertow.data.division import document_key
from undertow.data.encoding import Example, in_chunks
from undertow.data.records import Reading, Record, read_records
from undertow.data.tokenizer import Tokenizer

_FIELDS = ("prompt", "response", "messages", "system", "tools", "effort")


@dataclass(frozen=True)
class Conversation:
    """Messages: a system text or none, then user's side and assistant by turns, the assistant last; and the effort."""

    messages: tuple[Message, ...]
    effort: Effort = "none"

    @property
    def characters(self) -> int:
        """Length of all that is said."""
        return sum(len(text) for message in self.messages for text in message.texts)


def read_conversations(corpus: str, split: str = "train", reading: Reading | None = None) -> Iterator[Conversation]:
    """The conversations of `.jsonl` or `.parquet` files, a directory of them, or `hf:NAME[:CONFIG]`, streamed.

    A record has `prompt` and `response`, or `messages` (as `read_messages` takes them), and may have `system`, `tools`
    and `effort` (none, high or max; without it high where an assistant reasons, else none). Raises `InputError` naming
    the line or row.
    """
    if corpus in SHIPPED:
        raise InputError(
            f"corpus '{corpus}' is plain text; kind chat needs records of prompt and response, or messages"
        )
    found = False
    for record in read_records(corpus, _FIELDS, (), split, reading or Reading()):
        found = True
        yield conversation(record)
    if not found:
        raise InputError(f"corpus '{corpus}' is empty: it needs conversations")


def conversation(record: Record) -> Conversation:
    """The conversation of one record. Raises `InputError` for wrong fields, roles or order."""
    values, where = record.values, record.where
    given = {k: v for k in _FIELDS if (v := values.get(k)) is not None} if isinstance(values, dict) else {}
    if ("messages" in given) == bool(given.keys() & {"prompt", "response"}):
        raise InputError(f"{where}: expected an object with 'prompt' and 'response', or with 'messages'")
    messages = (
        read_messages(given["messages"], where)
        if "messages" in given
        else tuple(
            Message(role, _text(given.get(key), key, where))
            for role, key in (("user", "prompt"), ("assistant", "response"))
        )
    )
    for number, message in enumerate(messages, 1):
        if message.role in ("user", "assistant") and not message.calls:
            _text(message.content, f"message {number}'s content", where)
    if given.get("system", "") != "":
        messages = (Message("system", _text(given["system"], "system", where)), *messages)
    _check_order(messages, where)
    tools = read_tools(given["tools"], where) if given.get("tools") else ()
    effort = _effort(given.get("effort") or None, messages, where)
    found = Conversation(with_tools(messages, tools), effort)
    try:
        said = text_of(render(found.messages, effort))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    check_unicode(said, where)  # JSON of a call or a tool may name half a pair
    return found


def encode_conversations(conversations: Iterable[Conversation], tokenizer: Tokenizer) -> Iterator[Example]:
    """Each conversation's ids, of which what assistants say and their end tokens are learned; streamed.

    A marker is its own token where the tokenizer has it; no text can forge one. Elsewhere it is ordinary text.
    """
    for chunk in in_chunks((each, each.characters) for each in conversations):
        encoded = encode_pieces([render(each.messages, each.effort) for each in chunk], tokenizer)
        for each, tokens in zip(chunk, encoded, strict=True):
            texts = [text for message in each.messages for text in message.texts]
            yield Example(
                tokens.ids,
                tokens.learned,
                sum(len(text.encode()) for text in texts),
                document_key(json.dumps([_content(message) for message in each.messages])),
            )


def _content(message: Message) -> list[Any]:
    """What tells a message from others: role and content, then what else there is."""
    calls = [[call.name, call.arguments] for call in message.calls]
    rest = [message.reasoning, calls, list(message.tools), message.response_format]
    return [message.role, message.content, *(each for each in rest if each)]


def _effort(value: Any, messages: tuple[Message, ...], where: str) -> Effort:
    reasons = any(message.reasoning for message in messages)
    if value is None:
        return "high" if reasons else "none"
    if value not in get_args(Effort):
        raise InputError(f"{where}: effort is {value!r}; allowed: {', '.join(get_args(Effort))}")
    if value == "none" and reasons:
        raise InputError(f"{where}: effort is none, but an assistant reasons; leave one of them out")
    return value


def _text(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        told = "missing" if value is None else "empty" if value == "" else f"a {type(value).__name__}"
        raise InputError(f"{where}: {what} must be a non-empty string, it is {told}")
    check_unicode(value, where)
    return value


def _check_order(messages: tuple[Message, ...], where: str) -> None:
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    spoken = [role == "assistant" for role in turns]
    by_turns = not any(first and second for first, second in pairwise(spoken))
    if "system" in turns or not (spoken and not spoken[0] and spoken[-1] and by_turns):
        raise InputError(
            f"{where}: the roles are {', '.join(roles)}; allowed: system or nothing, then user (or developer, tool, "
            "latest_reminder) and assistant by turns, the assistant last"
        )
    unfinished = [number for number, message in enumerate(messages, 1) if message.prefix]
    if unfinished:
        raise InputError(f"{where}: message {unfinished[0]} is a prefix, which has no end; leave 'prefix' out")
