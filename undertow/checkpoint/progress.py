"""`progress.json` of a checkpoint: how far the run was, and what the tensor files beside it hold."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from undertow.config.errors import InputError
from undertow.config.reading import read_regular

PROGRESS = "progress.json"
_LARGEST = 1 << 26  # bytes: it names each tensor of the optimizer
NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
"""Name of a complete checkpoint, with its step."""


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Optimizer steps done, tokens learned from, where its data goes on (`Cursor.to_dict`), and the steps skipped because
    loss or gradient was not finite: in all, and in a row up to now.
    """

    step: int
    tokens: int
    cursor: dict[str, Any]
    skipped: int = 0
    skipped_in_row: int = 0


@dataclass(frozen=True)
class Held:
    """What the tensor files of a checkpoint hold: the weights' dtype, and the names in `optimizer.safetensors`."""

    dtype: str
    optimizer: list[str]


def progress_text(progress: Progress, held: Held) -> str:
    """The content of `progress.json`."""
    return json.dumps(asdict(progress) | asdict(held), indent=2) + "\n"


def read_progress(file: Path) -> tuple[Progress, Held]:
    """What `progress_text` wrote. Raises `InputError` for a damaged file, or one of another step than its directory."""
    names = [field.name for kind in (Progress, Held) for field in fields(kind)]
    try:
        values = json.loads(read_regular(file, _LARGEST))
        if values.keys() != set(names):
            raise ValueError
        progress = Progress(**{field.name: values[field.name] for field in fields(Progress)})
        held = Held(**{field.name: values[field.name] for field in fields(Held)})
        if not (_sound(progress) and isinstance(held.dtype, str) and isinstance(held.optimizer, list)):
            raise ValueError
    except (OSError, ValueError, AttributeError, RecursionError):
        raise InputError(
            f"{file}: damaged: a JSON object with {', '.join(names)} is expected; resume from an earlier checkpoint"
        ) from None
    named = NAME.fullmatch(file.parent.name)
    if named and int(named[1]) != progress.step:
        raise InputError(
            f"{file}: damaged: says step {progress.step} in {file.parent.name}; resume from an earlier checkpoint"
        )
    return progress, held


def _sound(progress: Progress) -> bool:
    counts = progress.step, progress.tokens, progress.skipped, progress.skipped_in_row
    whole = all(type(n) is int and 0 <= n < 2**63 for n in counts)
    return whole and progress.skipped_in_row <= progress.skipped and isinstance(progress.cursor, dict)
