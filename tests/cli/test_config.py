"""`undertow config show` and `undertow config diff`."""

import json

import pytest

from undertow.cli import main
from undertow.config.resolve import resolve


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("UNDERTOW_DEVICE", "UNDERTOW__SEED"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_show_prints_a_recipe_with_sources(capsys, folder, monkeypatch):
    monkeypatch.setenv("UNDERTOW__SEED", "5")
    assert main(["config", "show", "pretrain/quickstart", "train.steps=3", "train.beta1=0.8"]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "steps: 3 # command line" in lines
    assert "seed: 5 # environment UNDERTOW__SEED" in lines
    (folder / "again.yaml").write_text(text, encoding="utf-8")
    again = resolve("again.yaml", [], {}).config
    assert again == resolve("pretrain/quickstart", ["train.steps=3", "train.beta1=0.8", "seed=5"], {}).config


def test_show_json(capsys):
    assert main(["config", "show", "--json", "pretrain/quickstart", "train.steps=3"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries["train.steps"] == {"value": 3, "source": "command line"}


def test_diff(capsys, folder):
    (folder / "a.yaml").write_text("model: v4-debug\ntrain:\n  steps: 5\n", encoding="utf-8")
    (folder / "b.yaml").write_text("extends: a.yaml\ntrain:\n  steps: 6\n", encoding="utf-8")
    assert main(["config", "diff", "a.yaml", "b.yaml", "seed=1"]) == 0
    expected = "train.steps: 5 (a.yaml:3) -> 6 (b.yaml:3)\nseed: 0 (default) -> 1 (command line)\n"
    assert capsys.readouterr().out == expected
    assert main(["config", "diff", "--json", "a.yaml", "a.yaml"]) == 0
    assert json.loads(capsys.readouterr().out) == {}


def test_mistake_is_one_line_and_code_2(capsys, folder):
    (folder / "a.yaml").write_text("model: v4-debug\ntrain:\n  lerning_rate: 0.1\n", encoding="utf-8")
    assert main(["config", "show", "a.yaml"]) == 2
    out, err = capsys.readouterr()
    start = "error: a.yaml:3: unknown key 'train.lerning_rate' (given 0.1); did you mean 'train.learning_rate'? "
    assert (out, err.startswith(start), err.count("\n")) == ("", True, 1)
    assert main(["config", "show", "a.yaml", "train.steps"]) == 2
    message = "error: command line: 'train.steps' is not of the form section.key=value, such as train.steps=100\n"
    assert capsys.readouterr() == ("", message)
