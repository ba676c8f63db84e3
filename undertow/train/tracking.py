"""Where metrics go beside `metrics.jsonl`: TensorBoard event files, Weights & Biases, trackio."""

from __future__ import annotations

import importlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from undertow.config.errors import InputError
from undertow.train.disk import append, unwritable

PROJECT = "undertow"
FOLDER = "tensorboard"
"""Where event files lie in a run directory."""
IDENTITY = "tracking-id"
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


class Tracker(Protocol):
    """Takes the entries of `metrics.jsonl` one after another."""

    def write(self, entry: Mapping[str, Any]) -> None:
        """Hand over one step: its numbers by name. What is None is left out."""
        ...

    def close(self) -> None:
        """Deliver what is left and end."""
        ...


def refuse_missing(names: Iterable[str]) -> None:
    """Raise `InputError` for a tracker whose package is not installed."""
    for name in names:
        _package(name)


def open_trackers(names: Sequence[str], run_path: Path, config: dict[str, Any], step: int) -> list[Tracker]:
    """The trackers `names` of the run at `run_path`, which goes on after `step`.

    `config` is the run's configuration, for those that show one. Raises `InputError` for a missing package and a
    service that refuses the run, an `UndertowError` for files that cannot be written.
    """
    refuse_missing(names)
    return [
        EventFiles(run_path / FOLDER, step) if name == "tensorboard" else Service(name, run_path, config)
        for name in dict.fromkeys(names)
    ]


class EventFiles:
    """TensorBoard event files, a new one at each start, with one event a step that holds all its values.

    The file begins with a mark from which readers drop what earlier files hold of the steps after `step`. Records are
    written here and not by tensorboardX's queue, so that an error is told by `write` and a kill loses no step.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        self._checksum = importlib.import_module("tensorboardX.record_writer").masked_crc32c
        # Readers take files in the order of their names. Two starts within a second differ in the step, or hold the
        # same steps.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{step:012}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / name).open("wb", buffering=0)
        except OSError as error:
            raise unwritable(
                self._folder, error, "a directory is expected there, or leave tensorboard out of tracking"
            ) from None
        self._put(wall_time=time.time(), file_version="brain.Event:2")
        self._put(wall_time=time.time(), step=step + 1, session_log={"status": 1})  # SessionLog.START

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one step; it is with the system before this returns. Raises an `UndertowError` if that fails."""
        values = [{"tag": name, "simple_value": value} for name, value in _numbers(entry).items()]
        self._put(wall_time=entry.get("time", time.time()), step=entry["step"], summary={"value": values})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, **fields: Any) -> None:
        data = self._event(**fields).SerializeToString()
        size = struct.pack("<Q", len(data))
        sums = (struct.pack("<I", self._checksum(part)) for part in (size, data))
        record = size + next(sums) + data + next(sums)
        try:
            append(self._file, record)
        except OSError as error:
            raise unwritable(
                self._folder, error, "a directory is expected there, or leave tensorboard out of tracking"
            ) from None


class Service:
    """A run of Weights & Biases or of trackio, whose clients deliver in the background.

    A resumed run goes on under the identity that its directory keeps. Weights & Biases then passes over the steps that
    it has already; trackio shows them twice.
    """

    def __init__(self, name: str, run_path: Path, config: dict[str, Any]) -> None:
        package, identity = _package(name), _identity(run_path)
        given: dict[str, Any] = {"project": PROJECT, "config": config, "resume": "allow"}
        if name == "wandb":
            given |= {"id": identity, "name": run_path.resolve().name, "dir": run_path, "allow_val_change": True}
        else:
            given |= {"name": f"{run_path.resolve().name}-{identity}"}
        try:
            self._run = package.init(**given)
        except Exception as error:  # each client has its own kinds: not logged in, no network, no such project
            raise InputError(f"tracking {name}: {error}; or leave {name} out of tracking") from error

    def write(self, entry: Mapping[str, Any]) -> None:
        """Hand over one step."""
        self._run.log(_numbers(entry), step=entry["step"])

    def close(self) -> None:
        """Wait until all is delivered."""
        self._run.finish()


def _identity(run_path: Path) -> str:
    """The name of a run where names must be unique: drawn once, kept in its directory."""
    path = run_path / IDENTITY
    try:
        if not path.exists():
            fresh = path.with_name(f".{path.name}.writing")
            fresh.write_text(f"{secrets.token_hex(4)}\n", "utf-8")
            os.replace(fresh, path)
        return path.read_text("utf-8").strip()
    except OSError as error:
        raise unwritable(path, error, "a text file is expected there") from None


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an entry by name, less step and time, which every tracker has beside them."""
    kept = {name: value for name, value in entry.items() if name not in ("step", "time")}
    return {name: float(value) for name, value in kept.items() if isinstance(value, (int, float))}


def _package(name: str) -> Any:
    package = _PACKAGES[name]
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise InputError(
            f"tracking {name}: the package {package} is not installed; pip install 'undertow[{name}]', or leave "
            f"{name} out of tracking"
        ) from None
