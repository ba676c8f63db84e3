"""The quickstart's directory: which one it may use, and the file of figures that marks it as its own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from undertow.config.errors import InputError
from undertow.train.lock import LOCK

FIGURES, PAGE = "quickstart.json", "report.html"
MADE = ("run", "model", "model-transformers", "model-released", PAGE, FIGURES)
"""What a quickstart writes, and therefore removes when it starts anew."""

_UNFINISHED = ".writing"


def prepare(out: Path) -> bool:
    """Make `out` an empty directory marked as the quickstart's; return whether an earlier output was removed.

    Raises `InputError` for a directory that holds anything a quickstart did not write, or that cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for unfinished in out.glob(f".*{_UNFINISHED}"):
            unfinished.unlink()
        held = {entry.name for entry in out.iterdir()} - {LOCK}
        strange = sorted(held - set(MADE)) if FIGURES in held else sorted(held)
        if strange:
            raise InputError(f"{out}: holds {strange[0]!r}, no output of a quickstart; choose another with --out DIR")
        # The mark goes last, so that an interrupted removal can be taken up again.
        for name in (name for name in MADE if name in held):
            shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink()
        write_figures(out, {"finished": False})
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror}); choose another with --out DIR") from None
    return bool(held)


def write_figures(out: Path, figures: dict[str, Any]) -> None:
    """Replace the file of figures in one step."""
    _replace(out / FIGURES, json.dumps(figures, indent=2, ensure_ascii=False) + "\n")


def write_page(out: Path, page: str) -> None:
    """Replace the report in one step."""
    _replace(out / PAGE, page)


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}{_UNFINISHED}")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
