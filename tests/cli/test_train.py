"""`undertow train`: overrides, resume, and mistakes in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import undertow
from tests.engine.bytelevel import VOCABULARY, tokenizer
from undertow.cli import main
from undertow.config.layout import parse_layout
from undertow.planner.geometry import Batch, Geometry
from undertow.planner.memory.recompute import Recompute
from undertow.planner.tuner.fragment import fragment_of
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
        "train: {steps: 2, batch_size: 1, sequence_length: 40, eval_sequences: 1, checkpoint_every: 1}\n"
        "device: cpu\n"
    )
    return ["train", str(recipe), f"out={tmp_path / 'run'}"]


def test_train_then_resume(words, tmp_path, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"started: run directory {tmp_path / 'run'}, on cpu"
    assert out[1] == "operators: all by reference"
    assert out[2].startswith("data: 1 documents, 207 tokens, read 0.386 times; held out: 1 documents, 125 tokens")
    assert out[3].startswith("step 2/2  loss ") and out[4].startswith("done: step 2, 80 tokens, ")
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["device"] == "cpu" and environment["versions"]["torch"]

    assert main(words) == 2
    assert "holds a run (step-2); go on with --resume auto" in capsys.readouterr().err
    assert main([*words, "train.steps=3", "--resume", "auto"]) == 0
    assert capsys.readouterr().out.startswith("resumed from step-2: run directory")


def test_a_tuned_fragment_trains(words, tmp_path, capsys):
    tuned = undertow.plan(words[1], "1xH200", tune=True).tuned
    recipe = tmp_path / "tuned.yaml"
    recipe.write_text(f"extends: {words[1]}\n{tuned.fragment}", "utf-8")
    assert main(["train", str(recipe), words[2]]) == 0
    assert "done: step 2, 80 tokens, " in capsys.readouterr().out
    assert f'layout: "{tuned.layout}"' in (tmp_path / "run" / "config.yaml").read_text("utf-8")


def test_a_fragment_with_layers_computed_again_trains(words, tmp_path, capsys):
    layout = parse_layout(undertow.plan(words[1], "1xH200").layout)
    fragment = fragment_of(layout, "1f1b", Geometry(), Batch(1, 40), Recompute.of((0, 2)))
    recipe = tmp_path / "chosen.yaml"
    recipe.write_text(f"extends: {words[1]}\n{fragment}", "utf-8")
    assert main(["train", str(recipe), words[2]]) == 0
    assert "done: step 2, 80 tokens, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("train.stepz=1", 2, "did you mean 'train.steps'"),
        ("data.corpus=none.txt", 2, "corpus 'none.txt': there is no such file"),
        ("data.tokenizer=bpe-2048", 2, "its 2048 entries exceed the vocab_size"),
        ("optimizations.layout=on", 2, "optimizations.layout: not built yet"),
        ("parallel.pipeline=4", 2, "parallel.pipeline is 4: it can be planned (undertow plan), but one process"),
        ("recompute.modules.query=[9]", 2, "recompute.modules.query [9]: layers are 0 to"),
        ("parallel.layout=Et*3mL", 2, "layout 'Et*3mL', stages 0 to 0: 3 t (3 by stage); the model has"),
        ("parallel.layout=Et*2x", 2, "layout 'Et*2x', column 5: "),
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
    assert "interrupted after step 0; --resume auto begins anew, there is no checkpoint yet" in capsys.readouterr().out
    assert (tmp_path / "run" / "events.log").read_text().endswith("interrupted after step 0\n")


def test_a_run_goes_on_when_nobody_reads_its_output(words, tmp_path):
    command = [sys.executable, "-m", "undertow", *words, "train.steps=3", "train.log_every=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.wait(timeout=120) == 0, child.stderr.read()
    assert (tmp_path / "run" / "events.log").read_text().endswith("finished after step 3\n")


def test_sigterm_before_the_first_step_ends_with_130(words, tmp_path, monkeypatch):
    from undertow.train import start

    def slow(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not taken")

    monkeypatch.setattr(start, "build_model", slow)
    assert main(words) == 130
    assert not (tmp_path / "run").exists()
