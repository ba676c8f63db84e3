"""`metrics.jsonl`: one JSON object a step, each step once, also after a resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from undertow.model.router import Routing


class MetricsFile:
    """Appends to a metrics file. Opened at `step`, it first drops what a killed run wrote after that step."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [entry for entry in read_metrics(path) if entry["step"] <= step] if path.exists() else []
        fresh = path.with_name(f".{path.name}.writing")
        with fresh.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry: dict[str, Any]) -> None:
        """Append one step; it is with the system before this returns."""
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a metrics file; a last line that a killed run left unfinished is passed over."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def expert_load(routes: list[Routing]) -> tuple[float, float]:
    """Largest and smallest share of tokens that an expert of any layer got, as multiples of an even share."""
    loads = [_shares(route.indices, route.scores.shape[-1]) for route in routes]
    return max(float(load.max()) for load in loads), min(float(load.min()) for load in loads)


def _shares(indices: Tensor, experts: int) -> Tensor:
    return indices.flatten().bincount(minlength=experts) * (experts / indices.numel())
