"""Runs killed at random moments and resumed until done: the same run, to the bit, as one that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.bytelevel import VOCABULARY
from tests.train.events import shown
from undertow.checkpoint.directory import load_model
from undertow.checkpoint.folder import checkpoint_path, latest_checkpoint, steps_in
from undertow.checkpoint.progress import read_progress
from undertow.checkpoint.training import load_checkpoint
from undertow.config.resolve import resolve
from undertow.optim.build import build_optimizer
from undertow.train.metrics import read_metrics

pytestmark = pytest.mark.slow

STEPS, THAW, KEEP = 48, 24, 2
CLOCK = re.compile(r"time|train/(tokens_per_second|tflops_.*|mfu_.*)|eval/seconds|memory/.*|checkpoint/.*")
PATIENCE = 120.0  # seconds that a busy machine may take for anything waited for here


@pytest.fixture(scope="module")
def recipe(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of 48 short steps with a constant learning rate, so that a part of them is a run by itself."""
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    values = {
        "model": {
            "preset": "v4-debug",
            "vocab_size": VOCABULARY,
            "num_hidden_layers": 3,
            "compress_ratios": [0, 4, 8, 0],
        },
        "data": {"corpus": str(text / "corpus.jsonl"), "tokenizer": str(text), "validation_fraction": 0.2},
        "train": {
            **{"steps": STEPS, "batch_size": 2, "sequence_length": 48, "warmup_steps": 4, "decay_fraction": 0.0},
            **{"eval_every": 7, "eval_sequences": 1, "checkpoint_every": 3, "checkpoint_keep": KEEP, "log_every": 1},
        },
        "device": "cpu",
    }
    path.write_text(json.dumps(values), "utf-8")
    return path


def start(recipe: Path, run: Path, *changes: str) -> subprocess.Popen[str]:
    """`undertow train`, going on from what is there. It hears SIGINT, also where these tests run in the background."""
    command = [sys.executable, "-m", "undertow", "train", str(recipe), f'out="{run}"', *changes, "--resume", "auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        signal.signal(signal.SIGINT, heard)


def finish(recipe: Path, run: Path, *changes: str) -> None:
    """Let the run come to its end."""
    process = start(recipe, run, *changes)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, ""), (out, err)


def lines(run: Path) -> int:
    """Complete lines of the metrics file."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saving(run: Path) -> bool:
    """Whether a checkpoint is being written now."""
    folder = run / "checkpoints"
    return folder.is_dir() and any(name.endswith(".writing") for name in os.listdir(folder))


def await_(process: subprocess.Popen[str], happened: Callable[[], bool]) -> bool:
    """Wait until something has happened in the run; False if the run ends before."""
    end = time.monotonic() + PATIENCE
    while not happened():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.0005)
    return True


def kill(process: subprocess.Popen[str], run: Path, kind: str, draw: random.Random) -> bool:
    """Kill at a random moment of a kind: while starting, between or in steps, in a save. False if the run was done."""
    begun = lines(run)
    if kind == "start":
        delay, came = draw.uniform(0, 6), True
    elif kind == "step":
        more = draw.randint(1, 5)
        # A resumed run first drops the lines of the steps that it does again.
        came, delay = (
            await_(process, lambda: lines(run) != begun) and await_(process, lambda: lines(run) >= begun + more),
            draw.uniform(0, 0.1),
        )
    else:
        came, delay = await_(process, lambda: saving(run)), draw.uniform(0, 0.06)
    if came:
        time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def check_what_is_left(recipe: Path, run: Path, changes: tuple[str, ...]) -> None:
    """Every name of a checkpoint, and `latest`, stand for a complete one that loads."""
    folder = run / "checkpoints"
    latest = latest_checkpoint(folder)
    held = steps_in(folder) if folder.is_dir() else []
    assert bool(held) is (latest is not None) and len(held) <= KEEP + 1
    settings = resolve(str(recipe), list(changes), {}).config.train
    for path in {checkpoint_path(folder, step) for step in held} | ({latest} - {None}):
        assert path is not None
        model = load_model(path)
        load_checkpoint(path, model, build_optimizer(model, settings))
        assert read_progress(path / "progress.json")[0].step == int(path.name.removeprefix("step-"))


def disturbed(recipe: Path, run: Path, kinds: list[str], seed: int, *changes: str) -> list[str]:
    """Run to the end through kills of these kinds; return those that met the run at work."""
    draw, met = random.Random(seed), []
    for kind in kinds:
        if kill(start(recipe, run, *changes), run, kind, draw):
            met.append(kind)
        check_what_is_left(recipe, run, changes)
    finish(recipe, run, *changes)
    return met


def figures(run: Path) -> list[dict[str, object]]:
    """The metrics, less those that a clock or the memory of a process decides."""
    return [{k: v for k, v in entry.items() if not CLOCK.fullmatch(k)} for entry in read_metrics(run / "metrics.jsonl")]


def assert_same_run(run: Path, wanted: Path) -> None:
    ours, theirs = figures(run), figures(wanted)
    assert [entry["step"] for entry in ours] == list(range(1, STEPS + 1))
    assert {"train/loss", "train/lm_loss", "train/grad_norm", "train/lr"} <= ours[0].keys()
    assert ours == theirs
    last, other = run / "checkpoints" / f"step-{STEPS}", wanted / "checkpoints" / f"step-{STEPS}"
    for file in ("model.safetensors", "progress.json"):
        assert (last / file).read_bytes() == (other / file).read_bytes(), file
    moments, wanted_moments = (load_file(path / "optimizer.safetensors") for path in (last, other))
    assert moments.keys() == wanted_moments.keys()
    # Nothing is drawn from torch's own generator, which each process seeds anew.
    differing = [name for name, tensor in moments.items() if not torch.equal(tensor, wanted_moments[name])]
    assert set(differing) <= {"random/cpu"}
    kept = [f"step-{STEPS}", f"step-{STEPS - 3}"]
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", *sorted(kept)], "no leftovers, the newest two"
    assert sorted(os.listdir(run)) == sorted(os.listdir(wanted))
    assert shown(run / "tensorboard")["train/loss"] == shown(wanted / "tensorboard")["train/loss"]
    assert len(shown(run / "tensorboard")["train/loss"]) == STEPS


@pytest.fixture(scope="module")
def straight(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbed."""
    run = tmp_path_factory.mktemp("straight") / "run"
    finish(recipe, run)
    return run


def test_ten_kills_leave_no_trace(recipe: Path, straight: Path, tmp_path: Path) -> None:
    kinds = ["start", "save", "step", "save", "step", "start", "save", "step", "save", "step"]
    met = disturbed(recipe, tmp_path / "run", kinds, 20)
    assert met == kinds, "all ten met the run at work"
    assert_same_run(tmp_path / "run", straight)


def test_kills_before_and_after_the_indexer_thaws(recipe: Path, tmp_path: Path) -> None:
    first, second = (f"train.steps={THAW}", "indexer.frozen=true"), ("indexer.frozen=false",)
    finish(recipe, tmp_path / "straight", *first)
    finish(recipe, tmp_path / "straight", *second)
    frozen, thawed = figures(tmp_path / "straight")[THAW - 1 : THAW + 1]
    assert "train/indexer_loss" in thawed and "train/indexer_loss" not in frozen
    run = tmp_path / "run"
    assert disturbed(recipe, run, ["save", "step"], 21, *first) == ["save", "step"]
    assert disturbed(recipe, run, ["start", "step", "save"], 22, *second) == ["start", "step", "save"]
    assert_same_run(run, tmp_path / "straight")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_a_checkpoint_of_its_last_step(
    recipe: Path, straight: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = start(recipe, run)
    assert await_(process, lambda: lines(run) >= 4)
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, err) == (130, "")
    last = lines(run)
    latest = latest_checkpoint(run / "checkpoints")
    assert latest is not None and latest.name == f"step-{last}" and 4 <= last < STEPS
    assert f"interrupted after step {last}; --resume auto goes on from {latest}" in out
    check_what_is_left(recipe, run, ())
    finish(recipe, run)
    assert figures(run) == figures(straight)


def test_a_second_run_there_is_refused_while_the_first_lives(recipe: Path, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start(recipe, run)
    assert await_(first, lambda: lines(run) >= 1)
    first.send_signal(signal.SIGSTOP)
    try:
        second = start(recipe, run)
        out, err = second.communicate()
    finally:
        first.send_signal(signal.SIGCONT)
    assert second.returncode == 2 and out == "" and err.count("\n") == 1
    assert re.match(rf"error: \S+: process {first.pid} on \S+ is at work there; wait for it or stop it", err)
    first.kill()
    first.communicate()
    finish(recipe, run)
    assert_same_run(run, straight)
