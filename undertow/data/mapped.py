"""Files of numbers mapped into memory as they are read, of which only some are open at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from undertow.config.errors import UndertowError

OPEN = 128
"""Maps kept, the latest used: each holds its file open, and some systems allow a process 256 open files."""

Mapping = Callable[[Path, np.dtype, int], np.ndarray]


def mapping(kept: int = OPEN) -> Mapping:
    """What maps a file (path, type, length) into memory, and keeps the `kept` maps that were used last."""
    return lru_cache(kept)(_mapped)


@dataclass(frozen=True)
class MappedNumbers:
    """The `length` numbers of a file, of which a slice is an array [S]; only what is read comes into memory.

    Raises `UndertowError` for a file that is no longer there.
    """

    path: Path
    dtype: np.dtype
    length: int
    mapped: Mapping

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, chosen: slice) -> np.ndarray:
        return self.mapped(self.path, self.dtype, self.length)[chosen]


def _mapped(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    try:
        return np.memmap(path, dtype=dtype, mode="r", shape=(length,))
    except (OSError, ValueError) as error:  # the latter for a file that was cut
        raise UndertowError(f"{path}: was there at the start and cannot be read any more ({error})") from None
