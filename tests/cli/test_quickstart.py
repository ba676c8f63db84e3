"""`undertow quickstart`: the whole path, where it may write, and when it says no."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from undertow.cli import main
from undertow.cli.quickstart import SHORT, begin, course, samples
from undertow.cli.quickstart.bars import Bars, measure, words_pass
from undertow.cli.quickstart.killed import repeated, resumption, train_and_kill
from undertow.cli.quickstart.output import FIGURES, PAGE, prepare, write_figures
from undertow.cli.quickstart.samples import Words, sample_words
from undertow.config.errors import ConfigError, InputError, UndertowError
from undertow.config.model import ModelConfig
from undertow.config.resolve import resolve
from undertow.config.schema import DataConfig, TrainConfig
from undertow.engine.llm import LLM
from undertow.engine.sampling import SamplingParams
from undertow.train.lock import LOCK, locked
from undertow.train.metrics import read_metrics
from undertow.train.text import read_text


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    scenes = [f"HAMLET:\nTo be, or not to be, that is the question number {i}.\n" * 12 for i in range(8)]
    path.write_text("\f".join(scenes), "utf-8")
    return path


def tiny(corpus: Path, *more: str) -> tuple[str, ...]:
    """The short form with less text and fewer steps; the model, its length and every step of the course stay."""
    less = (
        "train.steps=2",
        "train.batch_size=1",
        "train.eval_every=2",
        "train.checkpoint_every=1",
        "indexer.dense_steps=1",
    )
    return (*SHORT, *less, f'data.corpus="{corpus}"', "device=cpu", *more)


@pytest.fixture(scope="module")
def made(corpus, tmp_path_factory) -> tuple[Path, int, str]:
    """The output of a quickstart that learned nothing and is judged, its exit code, and what it printed."""
    out, printed = tmp_path_factory.mktemp("made") / "quickstart", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(course, "SAMPLE_TOKENS", 4)
        patch.setattr(course, "WORDS", (3, 8))
        patch.setattr(samples, "GREEDY", replace(samples.GREEDY, max_tokens=4))
        with pytest.raises(typer.Exit) as ended:
            begin(out, tiny(corpus), judged=True)
    return out, ended.value.exit_code, printed.getvalue()


def test_everything_is_made(made):
    out, _, _ = made
    assert sorted(p.name for p in out.iterdir()) == [
        *("model", "model-released", "model-transformers", FIGURES, PAGE, "run")
    ]
    figures = json.loads((out / FIGURES).read_text())
    assert (figures["finished"], figures["judged"], figures["passed"]) == (True, True, False)
    assert figures["parameters"]["total"] == 1992060
    assert figures["nats_per_byte"] > figures["bars"]["token_unigram"]
    assert figures["words"]["sampled"] >= figures["words"]["known"] >= figures["words"]["distinct"]
    assert [sample.startswith(prompt) for sample, prompt in zip(figures["samples"], ("HAMLET", "[Enter"), strict=True)]
    assert (out / "run" / "checkpoints" / "latest").read_text() == "step-2\n"


def test_a_model_that_learned_nothing_fails_the_verdict(made):
    _, code, printed = made
    headings = [line[:2] for line in printed.splitlines() if line[:1].isdigit()]
    assert headings == ["1.", "2.", "3.", "4.", "5.", "6."]
    assert printed.count("the same greedy tokens as before export") == 3
    assert "the same as before saving" in printed
    assert "  The model is not good enough." in printed
    assert code == 1


def test_the_run_was_killed_and_resumed_to_the_bit(made):
    out, _, printed = made
    told = json.loads((out / FIGURES).read_text())["resumed"]
    assert "the one step that was taken again is the same to the last bit" in told and told in printed
    events = (out / "run" / "events.log").read_text()
    assert events.count("started") + events.count("resumed from") == 2 and events.count("finished") >= 1
    assert [entry["step"] for entry in read_metrics(out / "run" / "metrics.jsonl")] == [1, 2]
    assert told in (out / PAGE).read_text()


def test_the_model_directory_writes_text(made):
    (answer,) = LLM(made[0] / "model").generate(
        "HAMLET:", SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    )
    assert len(answer.token_ids) == 5


def test_a_branch_that_never_fires_is_refused(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"train\.sequence_length 96: selection would never take part"):
        begin(tmp_path / "out", ("train.sequence_length=96",), judged=True)
    assert "selection             NOT ACTIVE" in capsys.readouterr().out


def test_a_foreign_directory_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["quickstart", "--short", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error == f"error: {tmp_path}: holds 'thesis.txt', no output of a quickstart; choose another with --out DIR\n"
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_one_quickstart_at_a_time_holds_a_directory(tmp_path, capsys):
    out = tmp_path / "out"
    with locked(out):
        prepare(out)
        (out / "run").mkdir()
        assert main(["quickstart", "--short", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {out}: process {os.getpid()} on ") and "is at work there" in error
        assert (out / "run").is_dir()


def test_only_what_a_quickstart_wrote_is_replaced(tmp_path):
    out = tmp_path / "out"
    assert prepare(out) is False
    (out / "run" / "checkpoints").mkdir(parents=True)
    write_figures(out, {"finished": True})
    assert prepare(out) is True
    assert [p.name for p in out.iterdir()] == [FIGURES]
    assert json.loads((out / FIGURES).read_text()) == {"finished": False}
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'notes\.txt'"):
        prepare(out)


def test_interruption_ends_with_130(tmp_path, capsys, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(course.Course, "run", interrupted)
    assert main(["quickstart", "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().out == f"interrupted; what is complete stays in {tmp_path / 'out'}\n"


def test_bars_of_a_text(corpus):
    model = ModelConfig.from_preset("v4-tiny")
    text = read_text(DataConfig(corpus=str(corpus)), model, keep_text=True)
    bars = measure(text, TrainConfig(batch_size=1, sequence_length=64))
    assert bars.byte_bigram < bars.byte_unigram < 3.5
    # Every held-out token is frequent in training, and there are fewer than a hundred kinds of them.
    assert 0.5 < bars.token_unigram < bars.byte_unigram


@pytest.mark.parametrize(("reached", "passed"), [(1.9, True), (2.0, False), (2.5, False), (3.5, False)])
def test_byte_and_token_frequencies_must_be_beaten(reached, passed):
    assert Bars(byte_unigram=3.0, byte_bigram=2.0, token_unigram=2.2).passed_by(reached) is passed
    assert Bars(byte_unigram=3.0, byte_bigram=2.2, token_unigram=2.0).passed_by(reached) is passed


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (Words(1000, 500, 200), True),
        (Words(1000, 499, 300), False),
        (Words(1000, 900, 199), False),
        (Words(0, 0, 0), False),
    ],
)
def test_words_of_the_corpus_must_be_written(words, passed):
    assert words_pass(words) is passed


class Scripted:
    """Answers every prompt with the same text, as long as it lasts."""

    def __init__(self, text: str) -> None:
        self.text = text

    def generate(self, prompts, params):
        assert len({param.seed for param in params}) == len(prompts)
        return [SimpleNamespace(text=self.text) for _ in prompts]


def test_words_are_counted_without_the_last_of_a_sample():
    # "shal" is cut off at the end; "thou" and "gaol" stand in the corpus, "bree" does not, "to" is short.
    corpus = "Thou art in gaol; thou shalt stay"
    assert sample_words(Scripted("thou to Gaol bree shal"), corpus, 3, 8) == Words(3, 2, 2)  # type: ignore[arg-type]
    assert sample_words(Scripted("thou to Gaol bree shal"), corpus, 10, 8) == Words(10, 7, 2)  # type: ignore[arg-type]
    assert sample_words(Scripted("no word"), corpus, 10, 8) == Words(0, 0, 0)  # type: ignore[arg-type]


def test_a_run_that_ends_before_it_is_killed_is_told(tmp_path):
    with pytest.raises(UndertowError, match="ended by itself with code 2, before step 3"):
        train_and_kill(["no-such-recipe"], tmp_path / "metrics.jsonl", 3)


_QUICKSTART = """
import json, sys, typer
from pathlib import Path
from undertow.cli.quickstart import begin
try:
    begin(Path(sys.argv[1]), tuple(json.loads(sys.argv[2])), judged=False)
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


def _wait(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _free(run: Path) -> bool:
    """Whether no process holds the run: the system lets go of a process' lock when it ends."""
    try:
        with locked(run):
            return True
    except InputError:
        return False


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 130), (os.kill, signal.SIGKILL, -signal.SIGKILL)],
)
def test_the_child_does_not_outlive_its_parent(corpus, tmp_path, send, number, code):
    out, endless = tmp_path / "out", ("train.steps=100000", "train.checkpoint_every=50000")
    command = [sys.executable, "-c", _QUICKSTART, str(out), json.dumps(tiny(corpus, *endless))]
    # A group of its own, so that a signal to all of it is what a terminal sends on Ctrl-C.
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    _wait((out / "run" / "config.yaml").exists)
    assert not _free(out / "run")
    child = int((out / "run" / LOCK).read_text().split()[1])
    assert os.getpgid(child) == child  # a terminal's Ctrl-C does not reach it
    send(parent.pid, number)
    printed, errors = parent.communicate(timeout=30)
    assert (parent.returncode, errors) == (code, "")
    _wait(lambda: _free(out / "run"), 10)
    if code == 130:
        assert printed.splitlines()[-1] == f"interrupted; what is complete stays in {out}"
        assert printed.count("interrupted") == 1


@pytest.mark.parametrize(
    ("steps", "difference", "told"),
    [
        (0, 0.0, "no step had to be taken again."),
        (1, 0.0, "the loss of the one step that was taken again is the same to the last bit."),
        (2, 0.25, "the losses of the 2 steps that were taken again are the same up to 0.25."),
    ],
)
def test_a_resumption_in_words(steps, difference, told):
    killed = "Killed after step 9 and resumed from the last checkpoint: "
    assert resumption(9, steps, difference) == killed + told


def test_repeated_steps_are_compared():
    before = [{"step": n, "time": 0.0, "train/loss": float(n)} for n in (1, 2, 3)]
    after = [before[0], *({"step": n, "time": 1.0, "train/loss": n + (0.25 if n == 3 else 0.0)} for n in (2, 3, 4))]
    assert repeated(before, after) == (2, 0.25)
    assert repeated(before[:2], after) == (1, 0.0)
    assert repeated(before[:1], after) == (0, 0.0)


def test_the_short_form_keeps_the_length_and_the_model():
    short, full = (resolve("pretrain/quickstart", list(changes), {}).config for changes in (SHORT, ()))
    assert short.model == full.model
    assert short.train.sequence_length == full.train.sequence_length
    assert short.train.steps < full.train.steps
