"""The fastest layouts of one case within its memory: every one where that is few, starts and descent otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from undertow.planner.tuner.case import Cuts
from undertow.planner.tuner.cpsat import cpsat_cuts
from undertow.planner.tuner.descent import FEW, descend, even_cuts
from undertow.planner.tuner.enumeration import enumerate_layouts
from undertow.planner.tuner.trials import Trial, Trials


class Result(NamedTuple):
    """The best trials, best first, and whether no other layout can be faster than the first."""

    trials: tuple[Trial, ...]
    proven: bool


def search(
    trials: Trials, keep: int, *, share: float = 1.0, below: float = float("inf"), also: Sequence[Cuts] = ()
) -> Result:
    """The `keep` best layouts of a case; none if nothing fits. Layouts slower than `below` seconds may be left out.

    With one stage a rank all layouts are looked at that could be the best; with several, or if those are too many,
    descent starts from even stages, from an integer program and from layouts given `also`, with a `share` of the usual
    work.
    """
    case = trials.case
    if case.stages > len(case.parts):
        return Result((), True)
    found, proven = enumerate_layouts(trials, keep, below) if case.chunks == 1 else ([], False)
    if not proven:
        starts = [*also, *(trial.cuts for trial in found[:1]), even_cuts(case)]
        if share > FEW and (cuts := cpsat_cuts(case, share)):
            starts.append(cuts)
        found = [*found, *descend(trials, starts, share=share, below=below)]
    best = {trial.cuts: trial for trial in found}
    return Result(tuple(sorted(best.values(), key=lambda trial: trial.order)[:keep]), proven)
