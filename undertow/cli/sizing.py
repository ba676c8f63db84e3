"""The questions of `undertow plan` that are not about one training run: how many GPUs, how much fits, what serves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undertow.config.errors import InputError

if TYPE_CHECKING:
    from undertow.config.gpus import Gpu
    from undertow.planner.capacity.fit_plan import FitPlan
    from undertow.planner.capacity.largest import LargestPlan
    from undertow.planner.serving.serve import ServePlan

SERVING: tuple[str, ...] = ("tensor", "expert", "sequence_length")
"""Options of a training run that a serving plan takes too."""

_FLAGS = {"tensor": "--tp", "pipeline": "--pp", "expert": "--ep", "context": "--cp"}


def size(
    model: str,
    gpus: str | None,
    said: Mapping[str, Any],
    serving: Mapping[str, Any],
    other: Mapping[str, Any],
    limits: Mapping[str, float | None],
    *,
    fit: bool,
    serve: bool,
    gpu_file: Path | None,
    overrides: Sequence[str] | None,
) -> FitPlan | LargestPlan | ServePlan | None:
    """The answer to --fit or --serve; None without either. `said` are options of a training run, `serving` of a serving
    plan, `other` flags that neither takes, `limits` the flags that bound a GPU's memory, which --fit takes. Raises
    `InputError` for options that do not go together."""
    from undertow.config.clusters import read_gpus

    if not serve and (given := [name for name, value in serving.items() if value is not None]):
        raise InputError(f"--{given[0].replace('_', '-')} is for a serving plan; add --serve or leave it out")
    if not fit and not serve:
        return None
    asked = "--serve" if serve else "--fit"
    if fit and serve:
        raise InputError("--serve plans replicas and --fit GPUs for training; give one of them")
    if given := [flag for flag, value in other.items() if value]:
        raise InputError(f"{given[0]} goes with the plan of one training run, {asked} with none; leave one of them out")
    own = read_gpus(gpu_file, os.environ) if gpu_file else ()
    if fit:
        return _fitted(model, gpus, said, limits, own, overrides or ())
    if given := [flag for flag, value in limits.items() if value is not None]:
        raise InputError(f"{given[0]} is for a training run, --serve has --memory-fraction; leave one of them out")
    assert gpus is not None
    return _served(model, gpus, said, serving, own, overrides or ())


def _fitted(
    model: str,
    gpus: str | None,
    said: Mapping[str, Any],
    limits: Mapping[str, float | None],
    own: Sequence[Gpu],
    overrides: Sequence[str],
) -> FitPlan | LargestPlan:
    """With GPU names alone the smallest clusters, with a number of GPUs the most that they hold."""
    from undertow.planner.capacity.fit_plan import names_gpus_alone, plan_fit
    from undertow.planner.capacity.largest import plan_largest
    from undertow.planner.choice import Options
    from undertow.planner.tuner.tuning import Bounds

    given = {flag[2:].replace("-", "_"): value for flag, value in limits.items() if value is not None}
    options, rest = Options(**said), {"own_gpus": own, "overrides": overrides, "environment": os.environ}
    bounds = Bounds(**given)  # type: ignore[arg-type]
    if gpus is None or names_gpus_alone(gpus):
        return plan_fit(model, gpus, options, bounds=bounds, **rest)
    return plan_largest(model, gpus, options, bounds=bounds, **rest)


def _served(
    model: str,
    gpus: str,
    said: Mapping[str, Any],
    serving: Mapping[str, Any],
    own: Sequence[Gpu],
    overrides: Sequence[str],
) -> ServePlan:
    """A serving plan. Raises `InputError` for options of a training run that it does not have."""
    from undertow.planner.serving.serve import plan_serve

    for name, value in said.items():
        if value not in (None, False) and name not in SERVING:
            flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise InputError(f"{flag} is for a training run, --serve plans none; leave one of them out")
    return plan_serve(
        model,
        gpus,
        tensor=said["tensor"],
        expert=said["expert"],
        length=said["sequence_length"],
        **{name: value for name, value in serving.items() if value is not None},
        own_gpus=own,
        overrides=overrides,
        environment=os.environ,
    )
