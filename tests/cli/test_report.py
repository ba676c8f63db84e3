"""`undertow report`: which directories it takes, what it names the page, and what it says when it cannot."""

import json

import pytest

from undertow.cli import main


@pytest.fixture
def quickstart(tmp_path):
    run = tmp_path / "plays" / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens": 8, "train/lm_loss": 2.0}) + "\n")
    (run.parent / "report.html").write_text("the quickstart's own")
    return run.parent


def test_the_directory_above_a_run_is_taken_for_it(quickstart, capsys):
    assert main(["report", str(quickstart)]) == 0
    page = quickstart / "run" / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert "<title>Run plays/run</title>" in page.read_text()
    assert (quickstart / "report.html").read_text() == "the quickstart's own"


def test_the_working_directory_has_a_name(quickstart, monkeypatch, tmp_path):
    (quickstart / "run").rename(tmp_path / "second")
    monkeypatch.chdir(tmp_path / "second")
    assert main(["report", ".", "--out", "page.html"]) == 0
    assert "<title>Run second</title>" in (tmp_path / "second" / "page.html").read_text()


def test_what_holds_no_run_is_told(tmp_path, capsys):
    mend = "give the out=DIR of an `undertow train` that has taken a step"
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: holds neither metrics.jsonl nor run/metrics.jsonl; {mend}\n"
    )
    assert main(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: is no directory; {mend}\n"
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl: has no step yet" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_leaves_nothing(quickstart, capsys, tmp_path):
    (tmp_path / "taken").mkdir()
    assert main(["report", str(quickstart), "--out", str(tmp_path / "taken")]) == 2
    assert "taken: cannot be written (Is a directory)" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plays", "taken"]
