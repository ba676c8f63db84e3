"""`undertow plan --html`: a page beside the text, written in one step, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

from undertow.cli import main


def test_a_page_beside_the_text(tmp_path: Path, capsys):
    file = tmp_path / "plan.html"
    file.write_text("an older one")
    assert main(["plan", "v4-flash", "--gpus", "32xMI355X", "--html", str(file)]) == 0
    assert capsys.readouterr().out.startswith("v4-flash on 32xMI355X: fits")
    page = file.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "<h1>v4-flash on 32xMI355X</h1>" in page
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]


def test_a_plan_that_does_not_fit_has_a_page_too(tmp_path: Path, capsys):
    file = tmp_path / "plan.html"
    assert main(["plan", "v4-flash", "--gpus", "8xH200", "--html", str(file), "--json", "-"]) == 3
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert "v4-flash does not fit 8xH200" in file.read_text(encoding="utf-8")


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys):
    assert main(["plan", "v4-flash", "--gpus", "32xMI355X", "--html", str(tmp_path / "no" / "plan.html")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.rstrip().endswith("choose another with --html FILE")
    assert main(["plan", "v4-flash", "--gpus", "32xMI355X", "--html", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and list(tmp_path.iterdir()) == []
