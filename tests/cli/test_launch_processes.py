"""Several processes started for real: their metrics, their end, and what is told of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from undertow.cli import main
from undertow.train.metrics import read_metrics

pytestmark = pytest.mark.multi
SLOW = pytest.mark.slow
RECIPE = str(Path(__file__).parents[2] / "recipes" / "pretrain" / "cpu-2proc.yaml")
CLOCK = ("time", "train/tokens_per_second", "train/tflops_algorithmic", "train/tflops_reported", "memory/peak_bytes")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
SHORT = ("train.steps=4", "train.eval_every=2", "train.eval_sequences=3", "train.checkpoint_every=2")


def launched(folder: Path, *words: str, processes: int = 2) -> subprocess.Popen:
    command = [sys.executable, "-m", "undertow", "launch", RECIPE, "--nodes", "1", "--nproc", str(processes)]
    return subprocess.Popen(
        [*command, *words], cwd=folder, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ended(process: subprocess.Popen) -> tuple[int, list[str], list[str]]:
    """Exit code, lines of standard output, and errors."""
    out, error = process.communicate(timeout=120)
    return process.returncode, out.splitlines(), [line for line in error.splitlines() if line.startswith("error: ")]


def entries(run: Path) -> list[dict]:
    return [{k: v for k, v in entry.items() if k not in CLOCK} for entry in read_metrics(run / "metrics.jsonl")]


def test_a_mistake_is_told_once_with_its_code(tmp_path):
    code, out, errors = ended(launched(tmp_path, "init_from=nowhere"))
    assert (code, out) == (2, [])
    (error,) = errors
    assert error.startswith("error: rank ") and " of 2: nowhere: " in error
    assert not list(tmp_path.glob("runs/*"))


@SLOW
def test_two_processes_learn_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, errors = ended(launched(tmp_path, *SHORT))
    assert (code, errors) == (0, [])
    assert out[0] == "started: run directory runs/cpu-2proc, on cpu, 2 processes: shard 2"
    assert [line for line in out if line.startswith(("step", "done"))][-1].startswith("done: step 4, 1,024 tokens")
    assert main(["train", RECIPE, *SHORT, "parallel.shard=null", "out=one"]) == 0
    ours, theirs = entries(tmp_path / "runs" / "cpu-2proc"), entries(tmp_path / "one")
    assert [entry["step"] for entry in ours] == [1, 2, 3, 4]
    for mine, other in zip(ours, theirs, strict=True):
        norms = [name for name in other if name.endswith("grad_norm")]  # Muon's iteration amplifies rounding
        assert [mine.pop(name) for name in norms] == pytest.approx([other.pop(name) for name in norms], rel=1e-4)
        assert mine == pytest.approx(other, rel=1e-5)
    environment = json.loads((tmp_path / "runs" / "cpu-2proc" / "environment.json").read_text())
    assert (environment["device"], environment["processes"]) == ("cpu", 2)
    # One process goes on from what two have written.
    longer = ["train.steps=5", *SHORT[1:], "parallel.shard=null"]
    assert main(["train", RECIPE, "--resume", "auto", *longer]) == 0
    assert [entry["step"] for entry in entries(tmp_path / "runs" / "cpu-2proc")] == [1, 2, 3, 4, 5]


def begun(process: subprocess.Popen) -> list[int]:
    """Numbers of the ranks' processes, once the third step has been shown."""
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    found = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "undertow train"], text=True, capture_output=True)
    return [int(number) for number in found.stdout.split()]


@SLOW
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_processes_save_and_end_with_130(tmp_path, number):
    process = launched(tmp_path, "train.steps=5000", "train.log_every=1", "train.checkpoint_every=5000")
    begun(process)
    process.send_signal(number)
    code, out, errors = ended(process)
    assert (code, errors) == (130, [])
    step = out[-1].removeprefix("interrupted after step ").partition(";")[0]
    kept = tmp_path / "runs" / "cpu-2proc" / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["latest", f"step-{step}"]


@SLOW
@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_process_ends_the_others(tmp_path, which):
    process = launched(tmp_path, "train.steps=5000", "train.log_every=1")
    ranks = begun(process)
    assert len(ranks) == 2
    os.kill(sorted(ranks)[which], signal.SIGKILL)
    since = time.monotonic()
    code, _, errors = ended(process)
    assert code == 1 and time.monotonic() - since < 60
    assert f"error: rank {which} was ended by SIGKILL" in errors


@SLOW
def test_processes_of_a_killed_launcher_save_and_end(tmp_path):
    process = launched(tmp_path, "train.steps=5000", "train.log_every=1", "train.checkpoint_every=5000")
    begun(process)
    process.kill()
    code, out, errors = ended(process)  # once the ranks have closed what they share with it
    assert (code, errors) == (-signal.SIGKILL, []) and out[-1].startswith("interrupted after step ")
    kept = tmp_path / "runs" / "cpu-2proc" / "checkpoints"
    assert out[-1].endswith((kept / "latest").read_text().strip()) and not list(kept.glob(".*"))


@SLOW
@pytest.mark.parametrize("kind", ["told", "fault"])
def test_what_one_rank_meets_is_told_once(tmp_path, kind):
    script = str(Path(__file__).with_name("faulty.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, kind]
    found = subprocess.run(
        [*command, "train", RECIPE], cwd=tmp_path, env=ENVIRONMENT, text=True, capture_output=True, timeout=120
    )
    lines = found.stderr.splitlines()
    assert found.returncode == 1  # torchrun's own
    if kind == "told":
        assert [line for line in lines if "error: " in line] == ["error: rank 1 of 2: this rank has no such file"]
        assert " exitcode  : 2 " in found.stderr
    else:
        assert lines.count("RuntimeError: a fault") == 1 and "rank 1 of 2:" in lines
