"""Which keys were read: a run that sets a key nothing reads is a run that does not do what it says."""

from __future__ import annotations

from typing import Any

from undertow.config.schema import Section


class Tracked:
    """A view of a section with the same attributes, that notes each key whose value is taken.

    Sections below come as views too. Any other value counts as read as a whole, with all keys below it: the model's
    shape and the table of operators are handed to their readers in one piece.
    """

    def __init__(self, section: Section, reads: set[str] | None = None, prefix: str = "") -> None:
        self._section = section
        self._prefix = prefix
        self.reads: set[str] = set() if reads is None else reads
        """Dotted keys read so far, shared by the views of all sections."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._section, name)
        key = f"{self._prefix}{name}"
        if isinstance(value, Section):
            return Tracked(value, self.reads, f"{key}.")
        if name in type(self._section).model_fields:
            self.reads.add(key)
        return value

    def was_read(self, key: str) -> bool:
        """Whether a dotted key, or a whole value that contains it, was read."""
        parts = key.split(".")
        return any(".".join(parts[:depth]) in self.reads for depth in range(1, len(parts) + 1))
