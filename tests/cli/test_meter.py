"""The line that says how far a search is."""

from __future__ import annotations

import sys

from undertow.cli import meter as module
from undertow.cli.meter import meter


class Screen:
    """A terminal that keeps what is written to it."""

    def __init__(self) -> None:
        self.written = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        pass


def test_shown_after_a_while_and_gone_at_the_end(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(module, "_PATIENCE", -1.0)
    with meter("tuning") as show:
        show(1, 3)
        assert screen.written == "\rtuning: 1 of 3"
    assert screen.written.endswith("\r\033[K")


def test_a_short_search_shows_nothing(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with meter("tuning") as show:
        show(1, 3)
    assert screen.written == ""


def test_nothing_goes_to_a_file(capsys, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", -1.0)
    with meter("tuning") as show:
        show(1, 3)
    assert capsys.readouterr().err == ""
