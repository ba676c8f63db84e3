"""Text from files as messages show it: on one line, without what would steer a terminal, and not without end."""

from __future__ import annotations

_LONGEST = 60


def escape(code: int) -> str:
    """The character number `code` as JSON and Python escape it."""
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def printable(text: str) -> str:
    """`text` with control characters, line breaks, halves of surrogate pairs and the like as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else escape(ord(c)) for c in text)


def shortened(text: str, most: int = _LONGEST) -> str:
    """The first `most` characters of `text`, and three dots for more."""
    return text if len(text) <= most else f"{text[:most]}..."


def some(names: list[str], most: int = 3, longest: int = _LONGEST) -> str:
    """The first `most` of `names`, each of at most `longest` characters, with commas; dots for the others."""
    shown = ", ".join(printable(shortened(name, longest)) for name in names[:most])
    return f"{shown}, ..." if len(names) > most else shown
