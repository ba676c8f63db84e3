"""`metrics.jsonl`: one JSON object a step, each step once, also after a resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from undertow.config.errors import InputError, UndertowError
from undertow.model.router import Routing


class MetricsFile:
    """Appends to a metrics file. Opened at `step`, it first drops what a killed run wrote after that step.

    Raises `InputError` for a file that is damaged or cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [entry for entry in read_metrics(path) if entry["step"] <= step] if path.exists() else []
        fresh = path.with_name(f".{path.name}.writing")
        try:
            with fresh.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from None
        self._path = path

    def write(self, entry: dict[str, Any]) -> None:
        """Append one step; it is with the system before this returns. Raises `UndertowError` if that fails."""
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError as error:
            raise UndertowError(f"{self._path}: cannot be written ({error.strerror})") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a metrics file; a last line that a killed run left unfinished is passed over.

    Raises `InputError`, naming the line, for one that is no JSON object with a whole number as `step`.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield _entry(line, f"{path}, line {number}")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); a file of JSON lines is expected") from None


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        raise InputError(f"{where}: damaged: a JSON object with a whole number as step is expected; remove the line")
    return entry


def expert_load(routes: list[Routing]) -> tuple[float, float]:
    """Largest and smallest share of tokens that an expert of any layer got, as multiples of an even share."""
    loads = [_shares(route.indices, route.scores.shape[-1]) for route in routes]
    return max(float(load.max()) for load in loads), min(float(load.min()) for load in loads)


def _shares(indices: Tensor, experts: int) -> Tensor:
    return indices.flatten().bincount(minlength=experts) * (experts / indices.numel())
