"""A training run in a process of its own that is killed without warning, to be resumed afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from undertow.config.errors import UndertowError
from undertow.train.metrics import read_metrics

_PATIENCE = 0.05  # seconds between looks at the metrics


def train_and_kill(words: list[str], metrics: Path, step: int) -> list[dict[str, Any]]:
    """Run `undertow train` with the arguments `words`, kill it once `metrics` has `step`, and return all it wrote.

    Raises `UndertowError` where the run ends by itself before.
    """
    command = [sys.executable, "-m", "undertow", "train", *words]
    sys.stdout.flush()
    with subprocess.Popen(command) as child:
        try:
            while child.poll() is None and not _reached(metrics, step):
                time.sleep(_PATIENCE)
        finally:
            child.kill()
    if not _reached(metrics, step):
        raise UndertowError(f"the run to be killed ended by itself with code {child.returncode}, before step {step}")
    return list(read_metrics(metrics))


def _reached(metrics: Path, step: int) -> bool:
    """Whether the last whole line of a growing file is that of `step` or a later one."""
    if not metrics.exists():
        return False
    lines = metrics.read_bytes().split(b"\n")[:-1]
    return bool(lines) and json.loads(lines[-1])["step"] >= step


def repeated(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> tuple[int, float]:
    """How many steps were taken twice, before and after a resumption, and the largest difference of their losses.

    Steps up to the checkpoint stand in both with the same time: they were taken once.
    """
    again = {entry["step"]: entry for entry in after}
    pairs = [(one, again[one["step"]]) for one in before if one["step"] in again]
    twice = [(one["train/loss"], other["train/loss"]) for one, other in pairs if one["time"] != other["time"]]
    return len(twice), max((abs(one - other) for one, other in twice), default=0.0)
