"""`undertow train`: overrides, resume, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.bytelevel import VOCABULARY, tokenizer
from undertow.cli import main
from undertow.train.loop import Trainer


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A recipe and overrides for a run of two steps in `tmp_path/run`."""
    tokenizer().save(tmp_path)
    (tmp_path / "corpus.txt").write_text("to be or not to be, that is the question\n" * 8, "utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{preset: v4-debug, vocab_size: {VOCABULARY}}}\n"
        f"data: {{corpus: {tmp_path / 'corpus.txt'}, tokenizer: {tmp_path}, validation_fraction: 0.3}}\n"
        "train: {steps: 2, batch_size: 1, sequence_length: 40, eval_batches: 1, checkpoint_every: 1}\n"
        "device: cpu\n"
    )
    return ["train", str(recipe), f"out={tmp_path / 'run'}"]


def test_train_then_resume(words, tmp_path, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"started: run directory {tmp_path / 'run'}, on cpu"
    assert out[1].startswith("step 2/2  loss ") and out[2].startswith("done: step 2, 80 tokens, ")
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["device"] == "cpu" and environment["versions"]["torch"]

    assert main(words) == 2
    assert "holds a run (step-2); go on with --resume auto" in capsys.readouterr().err
    assert main([*words, "train.steps=3", "--resume", "auto"]) == 0
    assert capsys.readouterr().out.startswith("resumed from step-2: run directory")


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("train.stepz=1", 2, "did you mean 'train.steps'"),
        ("data.corpus=none.txt", 2, "corpus 'none.txt': there is no such file"),
        ("data.tokenizer=bpe-2048", 2, "its 2048 entries exceed the vocab_size"),
        ("optimizations.layout=on", 2, "optimizations.layout: not built yet"),
        ("train.learning_rate=1e30", 1, "step 2: held-out loss is nan; no checkpoint of this step is written"),
    ],
)
def test_mistakes_are_one_line(words, capsys, change, code, message):
    assert main([*words, change]) == code
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_interruption_is_told_and_ends_with_130(words, tmp_path, capsys, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert main(words) == 130
    assert "interrupted after step 0; there is no checkpoint yet" in capsys.readouterr().out
    assert (tmp_path / "run" / "events.log").read_text().endswith("interrupted after step 0\n")
