"""What a run shows while it works: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Reporter(Protocol):
    """Follows a run from `begin` to `end`; `say` shows one line in between."""

    def begin(self, step: int, steps: int) -> None:
        """The run starts after `step` of `steps`."""
        ...

    def step(self, metrics: dict[str, Any], seconds_left: float) -> None:
        """A step was taken; `metrics` are its line of `metrics.jsonl`."""
        ...

    def say(self, text: str) -> None:
        """Show a line."""
        ...

    def end(self) -> None:
        """The run is over, or was interrupted."""
        ...


class Lines:
    """A line every `every` steps, and one for every evaluation."""

    def __init__(self, every: int, write: Callable[[str], None] | None = None) -> None:
        self._every = every
        self._write = write or _print
        self._steps = 0

    def begin(self, step: int, steps: int) -> None:
        self._steps = steps

    def step(self, metrics: dict[str, Any], seconds_left: float) -> None:
        last = metrics["step"] == self._steps
        if last or metrics["step"] % self._every == 0 or "eval/loss" in metrics:
            self.say(
                f"step {metrics['step']}/{self._steps}  loss {_loss(metrics)}{_held_out(metrics)}  "
                f"{metrics['train/tokens_per_second']:,.0f} tokens/s  {duration(seconds_left)} left"
            )

    def say(self, text: str) -> None:
        self._write(text)

    def end(self) -> None:
        pass


class Bar:
    """A progress bar with loss, held-out loss, rate and time left; other lines scroll above it."""

    def __init__(self, console: Console) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("train", told="", total=None)
        self._held_out = ""

    def begin(self, step: int, steps: int) -> None:
        self._progress.update(self._task, completed=step, total=steps)
        self._progress.start()

    def step(self, metrics: dict[str, Any], seconds_left: float) -> None:
        self._held_out = _held_out(metrics) or self._held_out
        told = (
            f"loss {_loss(metrics)}{self._held_out}  {metrics['train/tokens_per_second']:,.0f} tokens/s  "
            f"{duration(seconds_left)} left"
        )
        self._progress.update(self._task, completed=metrics["step"], told=told)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def end(self) -> None:
        self._progress.stop()


def reporter(every: int) -> Reporter:
    """A bar where standard output is a terminal, else a line every `every` steps."""
    console = Console(file=sys.stdout)
    return Bar(console) if console.is_terminal else Lines(every)


def duration(seconds: float) -> str:
    """`7 s`, `3 min 20 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _loss(metrics: dict[str, Any]) -> str:
    loss = metrics["train/lm_loss"]
    return "none, step skipped" if loss is None or "train/skipped_for" in metrics else f"{loss:.3f}"


def _held_out(metrics: dict[str, Any]) -> str:
    if "eval/loss" not in metrics:
        return ""
    return f"  held-out {metrics['eval/loss']:.3f} ({metrics['eval/nats_per_byte']:.3f} nats/byte)"


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader (`| head`) has seen enough; the run goes on without it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
