"""Tags as they arrive: found whole, or as the beginning of what may still become one."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Bounds of what is held back.
_SPACE = re.compile(r"\s{0,16}")
LONGEST_NAME = 1024
"""Characters of the longest name in a tag."""


@dataclass(frozen=True)
class Tag:
    """The texts `heads`, white space allowed between them; then, with `tails`, a name and a tail.

    A name holds none of `barriers` and at most 1,024 characters; white space between heads is at most 16.
    """

    kind: str
    heads: tuple[str, ...]
    tails: tuple[str, ...] = ()
    barriers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """A `tag` at `start` to `end` of a text, its name and its tail; without a tag, what may still become one."""

    start: int
    end: int
    tag: Tag | None = None
    name: str = ""
    tail: str = ""


class Tags:
    """The tags that mean anything at one place of an answer."""

    def __init__(self, *tags: Tag) -> None:
        """Heads are not empty, and no tag begins with all of another."""
        self._tags = tags
        self._firsts = re.compile("[" + re.escape("".join({tag.heads[0][0] for tag in tags})) + "]")

    def find(self, text: str, at: int) -> Found:
        """The first tag in `text` from `at` on, or the rest that more text may make one (empty where none may)."""
        for candidate in self._firsts.finditer(text, at):
            found = [each for tag in self._tags if (each := _match(text, candidate.start(), tag))]
            if found:
                return max(found, key=lambda each: each.tag is not None)
        return Found(len(text), len(text))


def _match(text: str, start: int, tag: Tag) -> Found | None:
    at = start
    for number, head in enumerate(tag.heads):
        if number:
            at = _end_of_space(text, at)
        if not text.startswith(head, at):
            begun = len(text) - at < len(head) and head.startswith(text[at:])
            return Found(start, len(text)) if begun else None
        at += len(head)
    if not tag.tails:
        return Found(start, at, tag)
    return _named(text, start, at, tag)


def _named(text: str, start: int, at: int, tag: Tag) -> Found | None:
    """`tag`, of which `text` has the heads from `start` to `at`."""
    last = at + LONGEST_NAME  # where a tail starts at the latest
    window = last + max(map(len, tag.tails))
    places = [text.find(each, at, window + len(each)) for each in tag.barriers]
    barrier = min((place for place in places if place >= 0), default=window)
    ends = [(end, tail) for tail in tag.tails if (end := text.find(tail, at, min(barrier, last) + len(tail))) >= 0]
    if ends:
        end, tail = min(ends)
        return Found(start, end + len(tail), tag, text[at:end], tail)
    return Found(start, len(text)) if len(text) < barrier else None


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
