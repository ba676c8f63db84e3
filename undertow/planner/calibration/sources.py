"""What a calibration can be made of: whole runs, or results of a bench; a file's content says which it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undertow.config.errors import ConfigError
from undertow.config.gpus import Gpu
from undertow.planner.calibration.fields import read_fields
from undertow.planner.calibration.fit import fit_calibration
from undertow.planner.calibration.measured import Calibration
from undertow.planner.calibration.operators import BENCH, operator_calibration


def calibrate(paths: Sequence[Path], own: tuple[Gpu, ...] = ()) -> Calibration:
    """The calibration of one file of measured runs, or of results of `undertow bench kernels`, one file or several.

    Raises `ConfigError` for files that cannot be used, or not together.
    """
    read = [(read_fields(path), path) for path in paths]
    kinds = [fields.take("kind") for fields, _ in read]
    for kind, path in zip(kinds, paths, strict=True):
        if kind not in (None, BENCH):
            raise ConfigError(
                f"{path}: its kind is {str(kind)[:60]!r}; --calibrate takes measured runs, or results of undertow "
                "bench kernels, and a calibration that is there goes with --calibration"
            )
    if all(kinds):
        return operator_calibration([fields for fields, _ in read], own)
    if len(paths) > 1:
        runs = next(path for kind, path in zip(kinds, paths, strict=True) if kind is None)
        raise ConfigError(
            f"{runs}: holds measured runs, which make a calibration alone; give it without the other files, or results "
            "of undertow bench kernels only"
        )
    return fit_calibration(paths[0], own)
