"""The directory of a run: resolved configuration, environment, events, metrics and checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from undertow.checkpoint.training import latest_checkpoint
from undertow.config.dump import to_yaml
from undertow.config.errors import InputError
from undertow.config.resolve import Resolved
from undertow.train.disk import unwritable
from undertow.train.lock import LOCK, locked

CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.jsonl", "checkpoints"
ENVIRONMENT, EVENTS, TIMELINE = "environment.json", "events.log", "timeline.json"


@dataclass(frozen=True)
class RunDirectory:
    """A run's place on disk. `keeps`: this process is the one that writes there; of several ranks it is the first."""

    path: Path
    keeps: bool = True

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / METRICS

    @property
    def checkpoints(self) -> Path:
        """The folder of `step-N` and `latest`."""
        return self.path / CHECKPOINTS

    @contextmanager
    def claim(self, resume: bool) -> Iterator[Path | None]:
        """Hold the directory for a run; yield the checkpoint to go on from, None to start at the beginning.

        Raises `InputError` for a directory that holds something else, a run at work, or a run when `resume` is not
        wanted. One that was made here and is left empty goes again.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path}: is a file; a run needs a directory, choose one with out=DIR")
        held = self._held()
        if held and CONFIG not in held:
            raise InputError(f"{self.path}: is not empty and holds no run; choose another directory with out=DIR")
        with locked(self.path):
            yield self._origin(resume)

    def describe(self, resolved: Resolved, facts: dict[str, Any], device: torch.device, step: int) -> None:
        """Write `config.yaml` and `environment.json` of a run that goes on after `step`.

        `facts` are the caller's about the machine. A configuration that differs from the one before is kept as
        `config.until-step-N.yaml`.
        """
        if not self.keeps:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text, path = to_yaml(resolved), self.path / CONFIG
            before = path.read_text("utf-8") if step and path.exists() else text
            if _values(before) != _values(text):
                _replace(path.with_name(f"config.until-step-{step}.yaml"), before)
            _replace(path, text)
            environment = {
                **facts,
                "commit": _commit(),
                "device": str(device),
                "threads": torch.get_num_threads(),
            }
            _replace(self.path / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        except OSError as error:
            raise unwritable(self.path, error, "give out=DIR") from None

    def keep_timeline(self, timeline: dict[str, Any]) -> None:
        """Write what each rank of a pipeline did in a measured step."""
        if self.keeps:
            _replace(self.path / TIMELINE, json.dumps(timeline) + "\n")

    def note(self, event: str) -> None:
        """Append a line with the time to `events.log`. Raises an `UndertowError` where it cannot be written."""
        if not self.keeps:
            return
        path = self.path / EVENTS
        try:
            with path.open("a+b") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                whole = file.read() in (b"", b"\n")  # a full disk may have cut the last line
                text = f"{datetime.now(UTC).isoformat(timespec='seconds')}  {event}\n"
                file.write(text.encode() if whole else f"\n{text}".encode())
        except OSError as error:
            raise unwritable(path, error, "a text file is expected there") from None

    def _origin(self, resume: bool) -> Path | None:
        held = self._held()
        checkpoint = latest_checkpoint(self.checkpoints) if held else None
        if held and not resume:
            done = checkpoint.name if checkpoint else "no checkpoint yet"
            raise InputError(
                f"{self.path}: holds a run ({done}); go on with --resume auto, or choose another directory with out=DIR"
            )
        return checkpoint

    def _held(self) -> set[str]:
        """Names in the directory, less those that a run killed before it described itself may leave."""
        names = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        return names - {LOCK, _unfinished(CONFIG)}


def _values(text: str) -> list[str]:
    """Keys and values of a configuration, without the sources behind them."""
    return [line.rpartition("  # ")[0].rstrip() or line for line in text.splitlines()]


def _unfinished(name: str) -> str:
    return f".{name}.writing"


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(_unfinished(path.name))
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _commit() -> str | None:
    """The commit of the source tree this package runs from, or None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
