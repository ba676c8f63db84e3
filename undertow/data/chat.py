"""Conversations in DeepSeek-V4's chat format, chat mode: an answer opens with `</think>`; answers alone are learned.

A conversation is the begin token, system text, and for each turn `<｜User｜>`, what the user says, `<｜Assistant｜>`,
`</think>`, the answer and the end token. There are no tools and no reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from undertow.config.errors import InputError
from undertow.data.corpus import SHIPPED, check_unicode
from undertow.data.division import document_key
from undertow.data.encoding import Example, in_chunks
from undertow.data.records import Reading, Record, read_records
from undertow.data.tokenizer import Tokenizer

USER, ASSISTANT, ANSWER = "<｜User｜>", "<｜Assistant｜>", "</think>"
ROLES = ("system", "user", "assistant")
_FIELDS = ("prompt", "response", "messages", "system")


@dataclass(frozen=True)
class Message:
    """What `role` (system, user or assistant) says."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """Messages: a system text or none, then user and assistant by turns, the assistant last."""

    messages: tuple[Message, ...]

    @property
    def characters(self) -> int:
        """Length of all texts."""
        return sum(len(message.content) for message in self.messages)


def read_conversations(corpus: str, split: str = "train", reading: Reading | None = None) -> Iterator[Conversation]:
    """The conversations of `.jsonl` or `.parquet` files, a directory of them, or `hf:NAME[:CONFIG]`, streamed.

    A record has `prompt` and `response`, or `messages` (a list of {role, content}), and may have `system`. Raises
    `InputError` naming the line or row.
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
        _messages(given["messages"], where)
        if "messages" in given
        else [
            Message(role, _text(given.get(key), key, where))
            for role, key in (("user", "prompt"), ("assistant", "response"))
        ]
    )
    if given.get("system", "") != "":
        messages = [Message("system", _text(given["system"], "system", where)), *messages]
    _check_order(messages, where)
    return Conversation(tuple(messages))


def encode_conversations(conversations: Iterable[Conversation], tokenizer: Tokenizer) -> Iterator[Example]:
    """Each conversation's ids, of which answers and their end tokens are learned; streamed.

    A marker is its own token where the tokenizer has it; no text can forge one. Elsewhere it is ordinary text.
    """
    for chunk in in_chunks((each, each.characters) for each in conversations):
        pieces = [_pieces(each, tokenizer) for each in chunk]
        texts = [piece for each in pieces for piece, _ in each if isinstance(piece, str)]
        encoded = iter(tokenizer.encode_literally(texts))
        for each, parts in zip(chunk, pieces, strict=True):
            ids: list[int] = []
            learned: list[bool] = []
            for piece, learns in parts:
                ids += next(encoded) if isinstance(piece, str) else [piece]
                learned += [learns] * (len(ids) - len(learned))
            content = [[message.role, message.content] for message in each.messages]
            yield Example(
                np.array(ids, dtype=np.int32),
                np.array(learned, dtype=bool),
                sum(len(message.content.encode()) for message in each.messages),
                document_key(json.dumps(content)),
            )


def _pieces(conversation: Conversation, tokenizer: Tokenizer) -> list[tuple[str | int, bool]]:
    """Ids and texts in order, and whether they are learned; what is not is joined, as it is in a prompt."""
    pieces: list[tuple[str | int, bool]] = [(tokenizer.bos_id, False)]
    for message in conversation.messages:
        if message.role == "assistant":
            for marker in (ASSISTANT, ANSWER):
                _append(pieces, marker, tokenizer)
            pieces += [(message.content, True), (tokenizer.eos_id, True)]
        elif message.role == "user":
            _append(pieces, USER, tokenizer)
            _append(pieces, message.content)
        else:
            _append(pieces, message.content)
    return pieces


def _append(pieces: list[tuple[str | int, bool]], text: str, tokenizer: Tokenizer | None = None) -> None:
    """Add what is not learned: the id of a marker that the `tokenizer` has, or text, to that before it."""
    id = tokenizer.added_id(text) if tokenizer else None
    last = pieces[-1][0]
    if id is not None:
        pieces.append((id, False))
    elif isinstance(last, str):
        pieces[-1] = (last + text, False)
    else:
        pieces.append((text, False))


def _messages(values: Any, where: str) -> list[Message]:
    if not isinstance(values, list) or not values:
        raise InputError(f"{where}: 'messages' must be a list of at least one {{role, content}}")
    found = []
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise InputError(f"{where}: message {number} must be an object with 'role' and 'content'")
        role = value.get("role")
        if role not in ROLES:
            raise InputError(f"{where}: message {number} has the role {role!r}; allowed: {', '.join(ROLES)}")
        extra = [k for k, v in value.items() if k not in ("role", "content") and v not in (None, [], {}, "")]
        if extra:
            raise InputError(f"{where}: message {number} has '{extra[0]}', which this chat format does not carry")
        found.append(Message(role, _text(value.get("content"), f"message {number}'s content", where)))
    return found


def _text(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        told = "missing" if value is None else "empty" if value == "" else f"a {type(value).__name__}"
        raise InputError(f"{where}: {what} must be a non-empty string, it is {told}")
    check_unicode(value, where)
    return value


def _check_order(messages: list[Message], where: str) -> None:
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if not turns or len(turns) % 2 or turns != ["user", "assistant"] * (len(turns) // 2):
        raise InputError(
            f"{where}: the roles are {', '.join(roles)}; allowed: system or nothing, then user and assistant by turns, "
            "the assistant last"
        )
