"""The page of a run from its metrics alone."""

from tests.report.test_quickstart import METRICS
from undertow.report.run import run_page, run_sections


def test_figures_are_medians_of_the_steps():
    training = run_sections(METRICS)["Training"]
    for name, value in {
        "steps": "3",
        "steps skipped, loss or gradient not finite": "1",
        "tokens": "6,144",
        "TFLOP/s, algorithmic convention, median": "0.25",
        "peak memory": "1.50 GiB",
        "token after next loss, last step": "7.5000",
    }.items():
        assert f"<td>{name}</td><td>{value}</td>" in training


def test_page_of_a_run():
    page = run_page("runs/<mine>", METRICS)
    assert "Run runs/&lt;mine&gt;" in page and "3 steps, 6,144 tokens." in page
    assert page.count("<svg") == 4  # loss, load, recall, throughput


def test_what_a_run_does_not_tell_is_left_out():
    plain = [{"step": 1, "tokens": 8, "train/lm_loss": 2.0}]
    assert run_page("plain", plain).count("<svg") == 1
    assert "No step had a finite loss" in run_page("bad", [{"step": 1, "tokens": 0, "train/lm_loss": None}])
