"""A training run in a process of its own that is killed without warning, to be resumed afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from undertow.config.errors import UndertowError
from undertow.train.interruption import interruptible
from undertow.train.metrics import read_metrics

_PATIENCE = 0.05  # seconds between looks at the metrics


def train_and_kill(words: list[str], metrics: Path, step: int) -> list[dict[str, Any]]:
    """Run `undertow train` with the arguments `words`, kill it once `metrics` has `step`, and return all it wrote.

    The child does not outlive this process, however it ends. Raises `UndertowError` where the run ends by itself
    before, and `KeyboardInterrupt` on Ctrl-C or SIGTERM.
    """
    command = [sys.executable, "-m", "undertow.cli.quickstart.follower", *words]
    sys.stdout.flush()
    # A session of its own keeps a terminal's Ctrl-C from the child: one process answers it, in one line.
    with (
        interruptible() as asked,
        subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child,
    ):
        try:
            while not asked() and child.poll() is None and not _reached(metrics, step):
                time.sleep(_PATIENCE)
        finally:
            child.kill()
            _leave_bar(Console(file=sys.stdout))
    if asked():
        raise KeyboardInterrupt
    if not _reached(metrics, step):
        raise UndertowError(f"the run to be killed ended by itself with code {child.returncode}, before step {step}")
    return list(read_metrics(metrics))


def _leave_bar(console: Console) -> None:
    """A progress bar that was killed has left the terminal without a cursor, in the middle of its line."""
    if console.is_terminal:
        console.show_cursor()
        console.print()


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


def resumption(step: int, repeated_steps: int, difference: float) -> str:
    """A sentence on a run killed after `step` and on what `repeated` found."""
    killed = f"Killed after step {step} and resumed from the last checkpoint: "
    same = f"the same up to {difference:.2g}." if difference else "the same to the last bit."
    if repeated_steps == 0:
        return f"{killed}no step had to be taken again."
    if repeated_steps == 1:
        return f"{killed}the loss of the one step that was taken again is {same}"
    return f"{killed}the losses of the {repeated_steps} steps that were taken again are {same}"
