"""A model's answer as it is generated, into reasoning, content and tool calls, without ever needing the whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from undertow.config.errors import InputError
from undertow.data.chat.calls import BLOCK, INVOKE, PARAMETER
from undertow.data.chat.events import CallArguments, CallEnd, CallStart, Content, End, Event, Reasoning
from undertow.data.chat.markers import ANSWER, DSML, marker_ids
from undertow.data.chat.tags import Found, Tag, Tags
from undertow.data.tokenizer import EOS, StreamDecoder, Tokenizer

_SPELLED: Mapping[str, str] = MappingProxyType({ANSWER: ANSWER, DSML: DSML, EOS: EOS})
# Stand for markers that came as tokens: halves of surrogate pairs, which no decoded text holds.
_CODES: Mapping[str, str] = MappingProxyType({ANSWER: "\udc00", DSML: "\udc01", EOS: "\udc02"})


class ChatParser:
    """Parses the characters of one answer; each `push` returns what they complete.

    The events, joined, are the same however the text was cut. Only what may still become a tag is held back. No text
    raises an error: what the format does not know comes out as content, or as the reasoning or the value in which it
    stands. So do a block of calls inside the reasoning, `</think>` after it, a block without a call, and anything but
    white space between the tags of a block. What follows the end token belongs to no answer and is dropped.
    """

    def __init__(self, thinking: bool, spelling: Mapping[str, str] = _SPELLED) -> None:
        """`thinking`: the prompt ends with `<think>`. `spelling`: the text by which each marker arrives."""
        self._tags = _tags(spelling)
        self._restored = {ord(text): marker for marker, text in spelling.items() if len(text) == 1}
        self._state = "reasoning" if thinking else "content"
        self._held = ""
        self._calls = -1  # the call that began last
        self._complete = 0
        self._parameters = 0  # of that call
        self._string = False  # the value is one
        self._between = False  # content has begun between tags
        self._ended = False

    def push(self, text: str) -> list[Event]:
        """The events that `text`, the next of the answer, completes."""
        if self._ended:
            return []
        text, at, events = self._held + text, 0, []
        while not self._ended:
            found = self._tags[self._state].find(text, at)
            events += self._text(text[at : found.start])
            at = found.end if found.tag else found.start
            if not found.tag:
                break
            events += self._tag(found, found.tag)
        self._held = "" if self._ended else text[at:]
        return events

    def finish(self) -> list[Event]:
        """What is held back, and the end, unless an end token came. The answer takes no more text after it."""
        return [] if self._ended else [*self._text(self._held), self._end()]

    def _text(self, text: str) -> list[Event]:
        """What a text without tags is in this state."""
        if self._state in ("block", "call") and not self._between:
            text = text.lstrip()
            self._between = bool(text)
        text = text.translate(self._restored) if self._restored else text
        if not text:
            return []
        if self._state == "reasoning":
            return [Reasoning(text)]
        if self._state == "value":
            return [CallArguments(self._calls, _inside(text) if self._string else text)]
        return [Content(text)]

    def _tag(self, found: Found, tag: Tag) -> list[Event]:
        self._between = False
        name = found.name.translate(self._restored)
        match tag.kind:
            case "end":
                return [self._end()]
            case "answer" | "close block":
                self._state = "content"
            case "call":
                self._state, self._parameters = "call", 0
                self._calls += 1
                return [CallStart(self._calls, name)]
            case "parameter":
                self._state, self._string = "value", "true" in found.tail
                self._parameters += 1
                opening = f'{"{" if self._parameters == 1 else ", "}"{_inside(name)}": ' + '"' * self._string
                return [CallArguments(self._calls, opening)]
            case "close parameter":
                self._state = "call"
                return [CallArguments(self._calls, '"')] if self._string else []
            case "close call":
                self._state = "block"
                self._complete += 1
                return [CallArguments(self._calls, "}" if self._parameters else "{}"), CallEnd(self._calls)]
        return []

    def _end(self) -> End:
        self._ended = True
        return End(self._complete, self._state == "content")


class TokenParser:
    """`ChatParser` of token ids: a marker that the tokenizer has is known by its id, and text that spells it is text.

    An id that the tokenizer does not know becomes U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        """`thinking`: the prompt ends with `<think>`."""
        ids = marker_ids(tokenizer)
        spelling = {marker: _CODES[marker] if marker in ids else text for marker, text in _SPELLED.items()}
        self._codes = {ids[marker]: code for marker, code in _CODES.items() if marker in ids}
        self._decoder = StreamDecoder(tokenizer, specials=True)
        self._parser = ChatParser(thinking, spelling)

    def push(self, id: int) -> list[Event]:
        """The events that the next token completes."""
        if id in self._codes:
            return self._parser.push(self._decoder.flush() + self._codes[id])
        try:
            return self._parser.push(self._decoder.push(id))
        except InputError:
            return self._parser.push(self._decoder.flush() + "\ufffd")

    def finish(self) -> list[Event]:
        """As `ChatParser.finish`."""
        return [*self._parser.push(self._decoder.flush()), *self._parser.finish()]


def _tags(spelling: Mapping[str, str]) -> dict[str, Tags]:
    """What ends each state. A name stands on one line without `">`, and the end token ends it as it ends all."""
    open, close = f"<{spelling[DSML]}", f"</{spelling[DSML]}"
    barriers = ("\n", spelling[EOS])
    end = Tag("end", (spelling[EOS],))
    block, call = f"{open}{BLOCK}>", f'{open}{INVOKE} name="'
    parameter = f'{open}{PARAMETER} name="'

    def calling(*heads: str) -> Tag:
        return Tag("call", heads, ('">',), barriers)

    return {
        "reasoning": Tags(Tag("answer", (spelling[ANSWER],)), end),
        # A block opens with its first call; the blank line before it is part of it.
        "content": Tags(calling(f"\n\n{block}", call), calling(block, call), end),
        "block": Tags(calling(call), Tag("close block", (f"{close}{BLOCK}>",)), end),
        "call": Tags(
            Tag("parameter", (parameter,), ('" string="true">', '" string="false">'), (*barriers, '">')),
            Tag("close call", (f"{close}{INVOKE}>",)),
            end,
        ),
        "value": Tags(Tag("close parameter", (f"{close}{PARAMETER}>",)), end),
    }


def _inside(text: str) -> str:
    """A part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
