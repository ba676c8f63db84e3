"""Whole runs: recorded, resumed to the bit, and refused with one line."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from undertow.checkpoint.directory import load_model
from undertow.checkpoint.training import load_checkpoint
from undertow.config.errors import ConfigError, DoesNotFit, InputError, UndertowError
from undertow.config.resolve import resolve
from undertow.model.transformer import Transformer
from undertow.ops import OPS, registry
from undertow.optim.build import build_optimizer
from undertow.train import fit
from undertow.train import start as module
from undertow.train.loop import Trainer
from undertow.train.metrics import read_metrics
from undertow.train.pretrain import Outcome, pretrain
from undertow.train.progress import Lines

CLOCK = ("time", "train/tokens_per_second", "train/tflops_algorithmic", "train/tflops_reported", "memory/peak_bytes")


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
        *("checkpoints", "config.yaml", "environment.json", "events.log", "metrics.jsonl", "tensorboard")
    ]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step-2", "step-4"]
    assert (run / "checkpoints" / "latest").read_text() == "step-4\n"
    assert events(run) == ["started", "checkpoint step-2", "checkpoint step-4", "finished after step 4"]
    assert [entry["step"] for entry in entries(run)] == [1, 2, 3, 4]
    assert [entry["step"] for entry in entries(run) if "eval/loss" in entry] == [2, 4]
    assert lines[0] == f"started: run directory {run}, on cpu"
    assert (outcome.progress.step, outcome.progress.tokens) == (4, 4 * 96)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["system"] == "here"
    assert environment["ops"] == dict.fromkeys(OPS, "reference") and lines[1] == "operators: all by reference"


def test_calls_that_kernels_pass_on_are_told_once_with_the_reason(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "machine", lambda device: registry.Machine("cuda", "sm_90"))
    run, shown = tmp_path / "run", Shown()
    outcome = pretrain(recipe(run, "optimizations.fusion=off", "optimizations.grouped_gemm=off"), shown)
    attention = "by reference instead of triton: the kernels compute in bfloat16, not float32"
    told = [line.removeprefix("warning: ") for line in shown.lines if line.startswith("warning: ")]
    assert [line for line in told if attention in line] == [f"sparse_attention, csa_attention {attention}"]
    assert [event for event in events(run) if " instead of " in event] == told
    assert len(told) == len(set(told)) == 3
    assert {tuple(by) for by in outcome.model.ops.calls.taken.values()} == {("reference",)}


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


def test_optimizer_state_survives_and_absent_state_stays_absent(recipe, tmp_path):
    """A frozen indexer never has a gradient: no state to save, none to load, and the thawed run goes on with it."""
    frozen = pretrain(recipe(tmp_path / "run", "indexer.frozen=true"), Shown())
    model = load_model(tmp_path / "run" / "checkpoints" / "step-2")
    optimizer = build_optimizer(model, recipe(tmp_path).config.train)
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "step-4", model, optimizer) == frozen.progress
    kept = {name for name, p in model.named_parameters() if p in optimizer.state}
    without = {name for name, _ in model.named_parameters()} - kept
    assert without and without == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert optimizer.state[model.norm.weight]["step"].item() == 4.0
    assert torch.equal(model.norm.weight, frozen.model.norm.weight)
    thawed = pretrain(recipe(tmp_path / "run", "train.steps=5"), Shown(), resume=True).model
    assert all(not torch.equal(p, model.get_parameter(n)) for n, p in thawed.named_parameters() if n in without)


def test_a_frozen_indexer_is_warned_of_in_a_run_from_scratch(recipe, tmp_path):
    shown = Shown()
    pretrain(recipe(tmp_path / "run", "indexer.frozen=true", "train.steps=1"), shown)
    assert any(line.startswith("warning: indexer.frozen in a run from scratch: ") for line in shown.lines)
    again = Shown()
    pretrain(recipe(tmp_path / "run", "indexer.frozen=true", "train.steps=2"), again, resume=True)
    assert not any(line.startswith("warning: indexer.frozen") for line in again.lines)


def test_a_run_may_start_from_the_weights_of_a_model_directory(finished, recipe, tmp_path):
    source, outcome, _ = finished
    weights = source / "checkpoints" / "step-4"
    started = pretrain(
        recipe(tmp_path / "run", f'init_from="{weights}"', "train.steps=1", "train.learning_rate=1e-9",
               "train.min_learning_rate=0.0", "indexer.frozen=true"), Shown()
    )  # fmt: skip
    for name, parameter in started.model.named_parameters():
        torch.testing.assert_close(parameter, outcome.model.get_parameter(name), rtol=0, atol=1e-7)
    with pytest.raises(InputError, match=r"its sliding_window is 8, this recipe.s model has 9; set model"):
        pretrain(recipe(tmp_path / "other", f'init_from="{weights}"', "model.sliding_window=9"), Shown())


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_the_step_it_has_taken_and_goes_on_to_the_bit(
    finished, recipe, tmp_path, monkeypatch, number
):
    run, shown, take = tmp_path / "run", Shown(), Trainer.step
    with monkeypatch.context() as patch:

        def signalled(self):
            if self.progress.step == 2:
                os.kill(os.getpid(), number)
            return take(self)

        patch.setattr(Trainer, "step", signalled)
        with pytest.raises(KeyboardInterrupt):
            pretrain(recipe(run), shown)
    kept = run / "checkpoints" / "step-3"
    assert shown.lines[-1] == (f"interrupted after step 3; --resume auto goes on from {kept}")
    assert events(run)[-2:] == ["checkpoint step-3", "interrupted after step 3"]
    pretrain(recipe(run), Shown(), resume=True)
    assert entries(run) == entries(finished[0])


def test_interruption_before_the_first_step_is_over(recipe, tmp_path, monkeypatch):
    shown = Shown()
    stopping_after(0, monkeypatch, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe(tmp_path / "run"), shown)
    assert shown.lines[-1].startswith("interrupted after step 0; --resume auto begins anew")


def test_old_checkpoints_go(recipe, tmp_path):
    pretrain(recipe(tmp_path / "run", "train.checkpoint_every=1", "train.checkpoint_keep=2"), Shown())
    held = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert held == ["latest", "step-3", "step-4"]


@pytest.mark.parametrize(
    "change",
    [
        ("train.micro_batch_size=1",),
        ("optimizations.recompute=on",),
        ("recompute.layers=[1]", "train.optimizer=adamw"),
        ("train.state_profile=bf16", "numerics.dtype=bfloat16"),
        ("indexer.dense_steps=1", "indexer.warmup_steps=2"),
        ("train.batch_size_schedule=[[3,3]]", "train.sequence_length_schedule=[[4,24]]"),
    ],
)
def test_other_ways_to_train_resume_to_the_bit_too(recipe, tmp_path, monkeypatch, change):
    pretrain(recipe(tmp_path / "straight", *change), Shown())
    with monkeypatch.context() as patch:
        stopping_after(3, patch, RuntimeError)
        with pytest.raises(RuntimeError):
            pretrain(recipe(tmp_path / "run", *change), Shown())
    pretrain(recipe(tmp_path / "run", *change), Shown(), resume=True)
    assert entries(tmp_path / "run") == entries(tmp_path / "straight")


PARTS = ("recompute.layers=[1]", "recompute.modules.query=all", "recompute.modules.moe=[0,2]")


@pytest.mark.parametrize("change", [("optimizations.recompute=on",), PARTS], ids=["layers", "modules"])
def test_recomputation_changes_no_bit(finished, recipe, tmp_path, change):
    pretrain(recipe(tmp_path / "run", *change), Shown())
    assert entries(tmp_path / "run") == entries(finished[0])


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
    for key in ("attention.backend", "attention.csa_backend", "ops.indexer_select"):
        with pytest.raises(
            InputError, match=rf"^{key}: backend 'triton' cannot serve here: triton kernels run on a GPU"
        ):
            pretrain(recipe(run, f"{key}=triton"), Shown())
    said = r"^ops\.csa_attention reference: attention\.csa_backend chooses that backend"
    with pytest.raises(InputError, match=said):
        pretrain(recipe(run, "ops.csa_attention=reference"), Shown())
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="device 'cuda': torch sees no GPU here"):
            pretrain(recipe(run, "device=cuda"), Shown())
    assert not run.exists()


def test_the_configuration_of_a_run_is_a_recipe(finished, recipe, tmp_path):
    """Every default is spelled out there, also of keys that this run does not read."""
    again = resolve(finished[0] / "config.yaml", [f'out="{tmp_path / "run"}"'], {})
    pretrain(again, Shown())
    assert entries(tmp_path / "run") == entries(finished[0])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (("train.optimizer=adamw", "train.momentum=0.5"), r"train\.momentum"),
        (("indexer.frozen=true", "indexer.weight=2.0"), r"indexer\.weight"),
        (("indexer.warmup_learning_rate=0.5",), r"indexer\.warmup_learning_rate"),
        (("data.split=test",), r"data\.split"),
    ],
)
def test_a_key_without_effect_is_refused(recipe, tmp_path, changes, key):
    with pytest.raises(ConfigError, match=rf"nothing in this run reads {key} \(command line\)"):
        pretrain(recipe(tmp_path / "run", *changes), Shown())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["train.optimizer=adamw", "train.steps=3"])
def test_resume_with_what_does_not_go_on_changes_nothing(copied, recipe, change):
    before = {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    with pytest.raises(InputError, match=r"optimizer state of .* keeps exp_avg|train\.steps 3: the run is at step 4"):
        pretrain(recipe(copied, change), Shown(), resume=True)
    assert {path.name: path.read_bytes() for path in copied.iterdir() if path.is_file()} == before


def test_a_resumption_needs_its_first_weights_no_more(finished, recipe, tmp_path):
    weights = shutil.copytree(finished[0] / "checkpoints" / "step-4", tmp_path / "weights")
    pretrain(recipe(tmp_path / "run", f'init_from="{weights}"'), Shown())
    shutil.rmtree(weights)
    resumed = pretrain(recipe(tmp_path / "run", f'init_from="{weights}"', "train.steps=5"), Shown(), resume=True)
    assert resumed.progress.step == 5


def test_a_longer_context_may_start_from_a_shorter_one(finished, recipe, tmp_path):
    weights = finished[0] / "checkpoints" / "step-4"
    longer = ("model.max_position_embeddings=8192", "model.rope_scaling.factor=32.0", "train.steps=1")
    assert pretrain(recipe(tmp_path / "run", f'init_from="{weights}"', *longer), Shown()).progress.step == 1


def test_evaluation_goes_in_micro_batches_and_does_not_depend_on_them(recipe, tmp_path, monkeypatch):
    seen, trunk = [], Transformer.trunk

    def watched(self, ids, *given, **named):
        seen.append(len(ids))
        return trunk(self, ids, *given, **named)

    monkeypatch.setattr(Transformer, "trunk", watched)
    told = []
    for rows in (1, 2):
        out = tmp_path / str(rows)
        pretrain(recipe(out, f"train.micro_batch_size={rows}", "train.steps=2", "train.eval_sequences=3"), Shown())
        told.append(entries(out)[-1])
        assert max(seen) == 48 * rows
        seen.clear()
    assert told[0]["eval/loss"] == pytest.approx(told[1]["eval/loss"], rel=1e-5)


def test_what_cannot_fit_is_refused_before_it_is_built(recipe, tmp_path):
    with pytest.raises(DoesNotFit, match=r"weights and optimizer state take .* GiB, cpu has .*: take a smaller"):
        pretrain(recipe(tmp_path / "run", "model=v4-flash", "train.sequence_length=64"), Shown())
    assert not (tmp_path / "run").exists()


def test_a_step_that_may_not_fit_is_warned_of(recipe, tmp_path, monkeypatch):
    config = recipe(tmp_path / "run", "train.steps=1").config
    peak = fit.step_peak(config, torch.device("cpu")).total
    monkeypatch.setattr(fit, "memory_of", lambda device: peak - 1)
    shown = Shown()
    pretrain(recipe(tmp_path / "run", "train.steps=1"), shown)
    assert any(line.startswith("warning: a step is estimated to hold ") for line in shown.lines)
