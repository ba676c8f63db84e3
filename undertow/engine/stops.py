"""Stop strings in a growing text, whatever the cuts between its pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until one of `stops` is complete; text that may be the beginning of one is held back.

    The stop that is completed by the earliest character wins, the longest of those ending there; so the text that
    passes depends on the whole text alone, not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text now certain to precede any stop; sets `found` when one is complete; nothing may follow."""
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, when nothing follows any more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
