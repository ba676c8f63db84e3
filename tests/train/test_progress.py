"""What a run shows off a terminal and on one."""

import io

import pytest
from rich.console import Console

from undertow.train.progress import Bar, Lines, duration, reporter


def entry(step: int, **more) -> dict:
    return {"step": step, "train/lm_loss": 4.25, "train/tokens_per_second": 1234.5, **more}


HELD_OUT = {"eval/loss": 5.0, "eval/nats_per_byte": 1.6667}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_lines_come_at_their_rhythm_at_evaluations_and_at_the_end():
    lines: list[str] = []
    shown = Lines(4, lines.append)
    shown.begin(0, 7)
    for step in range(1, 8):
        shown.step(entry(step, **(HELD_OUT if step == 3 else {})), 65.0)
    shown.end()
    assert [line.split()[1] for line in lines] == ["3/7", "4/7", "7/7"]
    assert lines[0] == "step 3/7  loss 4.250  held-out 5.000 (1.667 nats/byte)  1,234 tokens/s  1 min 05 s left"
    assert lines[1] == "step 4/7  loss 4.250  1,234 tokens/s  1 min 05 s left"


def test_bar_on_a_terminal():
    screen = io.StringIO()
    shown = Bar(Console(file=screen, force_terminal=True, width=120))
    shown.begin(0, 2)
    shown.step(entry(1, **HELD_OUT), 3.0)
    shown.say("[a line]")
    shown.step(entry(2), 0.0)
    shown.end()
    text = screen.getvalue()
    assert "[a line]" in text and "2/2" in text
    assert "loss 4.250  held-out 5.000 (1.667 nats/byte)  1,234 tokens/s  0 s left" in text


def test_plain_lines_where_output_is_no_terminal():
    assert isinstance(reporter(10), Lines)
