"""The page of a run from its metrics alone."""

import re

from tests.report.test_quickstart import METRICS
from undertow.report.page import Row
from undertow.report.run import run_page, run_sections


def row(name: str, value: str, note: str = "") -> str:
    small = f"<small>{note}</small>" if note else ""
    return f"<tr><td>{name}{small}</td><td>{value}</td></tr>"


def test_figures_are_medians_of_the_steps_or_the_last_known():
    training = run_sections(METRICS)["Training"]
    for each in (
        row("steps", "3"),
        row("steps skipped", "1", "Their loss or gradient was not finite."),
        row("tokens", "6,144"),
        row("held-out loss, nats per token, at step 3", "7.0000", "Over a sample of it, see Loss."),
        row("held-out loss, nats per byte, at step 3", "2.3000", "The same loss in a unit that no tokenizer changes."),
        row("balance loss, at step 2", "1.2500", "1 is even."),
        row("token after next (MTP), nats per token, at step 3", "7.5000"),
        row("tokens per second, median of the steps", "2,048"),
        row("TFLOP/s, algorithmic convention, median", "0.25", "Counts the arithmetic that the architecture asks for."),
        row("peak memory", "1.50 GiB", "Of the whole process on a CPU, of tensors on a GPU."),
    ):
        assert each in training


def test_page_of_a_run():
    page = run_page("runs/<mine>", METRICS, [Row("commit", "abc")])
    assert "Run runs/&lt;mine&gt;" in page and "3 steps, 6,144 tokens." in page and row("commit", "abc") in page
    headings = [part.split("</h2>")[0] for part in page.split("<h2>")[1:]]
    assert headings == [
        *("Loss", "Run", "Training", "Learning rate", "Loss of the token after next", "Balance loss"),
        *("Load of the experts", "What the indexer finds", "Throughput"),
    ]
    assert page.count("<svg") == 7


def test_a_step_without_a_loss_breaks_the_line_and_an_evaluation_does_not():
    sections = run_sections(METRICS)
    batch, held_out = re.findall(r'class="line[^"]*" d="([^"]*)"', sections["Loss"])
    assert (batch.count("M"), held_out.count("M")) == (2, 1)
    assert sections["What the indexer finds"].count('class="dot') == 1


def test_what_a_run_does_not_tell_is_left_out():
    plain = [{"step": 1, "tokens": 8, "train/lm_loss": 2.0}]
    page = run_page("plain", plain)
    assert page.count("<svg") == 1 and "<h2>Run</h2>" not in page and "peak memory" not in page
    assert "No step had a finite loss" in run_page("bad", [{"step": 1, "tokens": 0, "train/lm_loss": None}])


def test_nulls_are_no_fault():
    keys = ("tokens", "train/lm_loss", "train/skipped", "memory/peak_bytes", "eval/loss", "train/tflops_reported")
    page = run_page("odd", [{"step": 1, **dict.fromkeys(keys)}])
    assert "1 step, an unknown number of tokens." in page and "<svg" not in page
