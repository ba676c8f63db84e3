"""How torch's CPU threads wait for one another: a choice that has to be made before torch is loaded."""

from __future__ import annotations

import os


def patient_threads() -> None:
    """Let threads sleep while they wait, unless OMP_WAIT_POLICY is set.

    By default they spin, which gains little on a free machine and costs a multiple of the time on one where anything
    else is running. Call it before torch is imported; later it has no effect.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
