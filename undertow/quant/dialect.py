"""Which of the two E4M3 dialects a chip computes in. This is the one place that answers; it needs no torch."""

from __future__ import annotations

import re
from typing import Literal

from undertow.config.errors import InputError

Dialect = Literal["ocp", "fnuz"]
"""`ocp`: bias 7, largest 448, two zeros. `fnuz`: bias 8, largest 240, one zero. The same byte means twice as much in
`ocp`."""

_NATIVE: tuple[tuple[str, Dialect | None], ...] = (
    (r"gfx94[0-9a-f]", "fnuz"),
    (r"gfx95[0-9a-f]", "ocp"),
    (r"gfx12[0-9a-f]{2}", "ocp"),
    (r"sm_(89|9\d|\d{3})[af]?", "ocp"),
    (r"gfx[0-9a-f]{3,4}", None),
    (r"sm_\d{2}", None),
    (r"x86_64|amd64|aarch64|arm64", None),
)


def native_dialect(architecture: str) -> Dialect | None:
    """The dialect of the matrix units of `architecture` (`gfx942`, `sm_90`, `x86_64`); None where they have no FP8.

    AMD's feature flags may follow the name (`gfx942:sramecc+:xnack-`). Product names are not accepted, since they
    mislead: an MI325X is a gfx942. Raises `InputError` for what is no architecture string.
    """
    name = architecture.split(":")[0]
    for pattern, dialect in _NATIVE:
        if re.fullmatch(pattern, name):
            return dialect
    raise InputError(
        f"architecture {architecture!r} is unknown; gfxNNN, sm_NN or the processor's name (x86_64, aarch64) is expected"
    )
