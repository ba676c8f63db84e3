"""`metrics.jsonl`: one JSON object a step, each step once, also after a resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from undertow.config.errors import InputError, UndertowError
from undertow.train.disk import append, unwritable


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
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise unwritable(path, error, "a file of JSON lines is expected there") from None
        self._path = path

    def write(self, entry: dict[str, Any]) -> None:
        """Append one step; it is with the system before this returns.

        Raises `UndertowError` if that fails, or where the path names this file no longer.
        """
        try:
            if not self._path.exists() or not os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                raise UndertowError(
                    f"{self._path}: was removed or renamed while the run is at work; put the run directory back and go "
                    "on with --resume auto"
                )
            append(self._file, f"{json.dumps(entry)}\n".encode())
        except OSError as error:
            raise unwritable(self._path, error, "a file of JSON lines is expected there") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a metrics file; a last line that a killed run left unfinished is passed over.

    Raises `InputError`, naming the line, for one that is no JSON object with a whole number as `step`, or whose step
    does not come after the one before.
    """
    last = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith((b"\n", b"}")):
                    entry = _entry(line, f"{path}, line {number}")
                    if not last < entry["step"] < 2**63:
                        raise InputError(
                            f"{path}, line {number}: damaged: step {entry['step']} after step {last}; remove the line"
                        )
                    last = entry["step"]
                    yield entry
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
