"""Whole runs: recorded, resumed to the bit, and refused with one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from undertow.checkpoint.directory import load_model
from undertow.checkpoint.training import load_checkpoint
from undertow.config.errors import ConfigError, InputError, UndertowError
from undertow.train import pretrain as module
from undertow.train.loop import Trainer, adamw
from undertow.train.metrics import read_metrics
from undertow.train.pretrain import Outcome, pretrain
from undertow.train.progress import Lines

CLOCK = ("time", "train/tokens_per_second")


class Shown(Lines):
    """Keeps what a run shows."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        super().__init__(2, self.lines.append)


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory) -> tuple[Path, Outcome, list[str]]:
    """A run of four steps, not to be changed, its outcome and what it showed."""
    path, shown = tmp_path_factory.mktemp("finished") / "run", Shown()
    return path, pretrain(recipe(path), shown, facts={"system": "here"}), shown.lines


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def entries(path: Path) -> list[dict]:
    return [{k: v for k, v in entry.items() if k not in CLOCK} for entry in read_metrics(path / "metrics.jsonl")]


def events(path: Path) -> list[str]:
    return [line.split("  ", 1)[1] for line in (path / "events.log").read_text().splitlines()]


def test_a_run_and_its_directory(finished):
    run, outcome, lines = finished
    assert sorted(p.name for p in run.iterdir()) == [
        *("checkpoints", "config.yaml", "environment.json", "events.log", "metrics.jsonl")
    ]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step-2", "step-4"]
    assert (run / "checkpoints" / "latest").read_text() == "step-4\n"
    assert events(run) == ["started", "checkpoint step-2", "checkpoint step-4", "finished after step 4"]
    assert [entry["step"] for entry in entries(run)] == [1, 2, 3, 4]
    assert [entry["step"] for entry in entries(run) if "eval/loss" in entry] == [2, 4]
    assert lines[0] == f"started: run directory {run}, on cpu"
    assert (outcome.progress.step, outcome.progress.tokens) == (4, 4 * 96)
    assert json.loads((run / "environment.json").read_text())["system"] == "here"


def test_a_checkpoint_is_a_model_directory(finished):
    run, outcome, _ = finished
    ours, theirs = load_model(run / "checkpoints" / "step-4").state_dict(), outcome.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (run / "checkpoints" / "step-4" / "tokenizer.json").is_file()


def stopping_after(step: int, monkeypatch, error: type[BaseException]) -> None:
    take = Trainer.step

    def until(self):
        if self.progress.step == step:
            raise error("stop")
        return take(self)

    monkeypatch.setattr(Trainer, "step", until)


def test_a_resumed_run_repeats_the_uninterrupted_one_to_the_bit(finished, recipe, tmp_path, monkeypatch):
    straight, outcome, _ = finished
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stopping_after(3, patch, RuntimeError)
        with pytest.raises(RuntimeError):
            pretrain(recipe(run), Shown())
    assert [entry["step"] for entry in entries(run)] == [1, 2, 3]
    torch.manual_seed(99)
    resumed = pretrain(recipe(run), Shown(), resume=True)
    assert entries(run) == entries(straight)
    wanted = outcome.model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in resumed.model.state_dict().items())
    assert events(run)[2:] == [
        *("failed after step 3", "resumed from step-2", "checkpoint step-4", "finished after step 4")
    ]


def test_optimizer_state_survives_and_absent_state_stays_absent(finished, recipe):
    run, outcome, _ = finished
    model = load_model(run / "checkpoints" / "step-2")
    optimizer = adamw(model, recipe(run).config.train)
    assert load_checkpoint(run / "checkpoints" / "step-4", model, optimizer) == outcome.progress
    kept = {name for name, p in model.named_parameters() if p in optimizer.state}
    without = {name for name, _ in model.named_parameters()} - kept
    # Nothing of the main objective reaches the indexer through its discrete choice.
    assert without and all(".indexer." in name for name in without)
    assert optimizer.state[model.norm.weight]["step"].item() == 4.0
    assert torch.equal(model.norm.weight, outcome.model.norm.weight)


def test_resume_of_a_finished_run_does_nothing(copied, recipe):
    before = entries(copied)
    assert pretrain(recipe(copied), Shown(), resume=True).progress.step == 4
    assert entries(copied) == before


def test_a_finished_run_goes_on_when_it_gets_more_steps(copied, recipe):
    assert pretrain(recipe(copied, "train.steps=5"), Shown(), resume=True).progress.step == 5
    assert [entry["step"] for entry in entries(copied)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.sliding_window=9", r"step-4: a checkpoint of another model: its sliding_window is 8, this run's is 9"),
        ("data.validation_fraction=0.4", "does not belong to these documents and seed"),
        ("seed=1", "does not belong to these documents and seed"),
    ],
)
def test_resume_with_another_model_or_data_is_refused(finished, recipe, change, message):
    run, *_ = finished
    before = (run / "config.yaml").read_text(), events(run)
    with pytest.raises(InputError, match=message):
        pretrain(recipe(run, change), Shown(), resume=True)
    assert ((run / "config.yaml").read_text(), events(run)) == before


def test_interruption_says_what_is_kept(recipe, tmp_path, monkeypatch):
    run, shown = tmp_path / "run", Shown()
    stopping_after(3, monkeypatch, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe(run), shown)
    kept = run / "checkpoints" / "step-2"
    assert shown.lines[-1] == (
        f"interrupted after step 3; {kept} is the last checkpoint; --resume auto goes on from it"
    )
    assert events(run)[-1] == "interrupted after step 3"


def test_what_is_not_finite_is_one_line(recipe, tmp_path, monkeypatch):
    build = module.build_model

    def poisoned(*given):
        model = build(*given)
        with torch.no_grad():
            model.layers[2].ffn.experts.w2[0, 0, 0] = float("nan")
        return model

    monkeypatch.setattr(module, "build_model", poisoned)
    with pytest.raises(UndertowError, match=r"step 1: .*: layers\.2\.ffn\.experts\.w2 \(its value\)"):
        pretrain(recipe(tmp_path / "run"), Shown())


def test_what_cannot_run_is_refused_before_the_first_step(recipe, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"optimizations\.fp8: not built yet"):
        pretrain(recipe(run, "optimizations.fp8=on"), Shown())
    with pytest.raises(InputError, match="backend 'triton' cannot serve here"):
        pretrain(recipe(run, "attention.csa_backend=triton"), Shown())
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="device 'cuda': torch sees no GPU here"):
            pretrain(recipe(run, "device=cuda"), Shown())
    assert not run.exists()
