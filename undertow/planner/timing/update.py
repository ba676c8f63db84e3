"""Seconds that gradients and the optimizer take beside what is sent, where single operators were measured."""

from __future__ import annotations

from undertow.model.parameters import Parameters
from undertow.model.peak import State
from undertow.planner.memory.model import MemoryModel
from undertow.planner.memory.parameters import RankParameters
from undertow.planner.memory.state import StateProfile
from undertow.planner.pipeline.timeline import StageTime
from undertow.planner.timing.operators import COPY, OperatorRates

_CLIPPED = 3
"""Times that clipping moves a gradient: read for the norm, read and written."""


def with_update(memory: MemoryModel, rates: OperatorRates, parameters: RankParameters, time: StageTime) -> StageTime:
    """`time` of a place with its gradients summed over microbatches, and once an iteration clipped and taken in by the
    optimizer, each rank its own part.

    Sums and clipping go at the rate of a large copy. State on the host is not counted.
    """
    profile, geometry, batch = memory.profile, memory.m.geometry, memory.m.batch
    gradients = [profile.profile.gradients(part) for part in parameters]
    made = sum(part.low * 2 + part.high * 4 for part in parameters)
    later = 1 - 1 / max(1, batch.microbatches(geometry))  # the first microbatch's have nothing to be added to
    summed = later * rates.seconds(COPY, made + 2 * sum(gradients))
    sharing = memory.sharing or profile.sharing
    copies = (1, 1) if sharing == "none" else (geometry.dense_copies, geometry.expert_data)
    if sharing == "full":
        copies = (geometry.dense_parts, geometry.expert_parts)
    step = 0.0
    for part, size, ranks in zip(parameters, gradients, copies, strict=True):
        own = rates.seconds(COPY, _CLIPPED * size) + (0.0 if profile.host else _update(profile, rates, part))
        step += own / ranks
    return time._replace(backward=time.backward + summed, weight=time.weight + summed, step=time.step + step)


def _update(profile: StateProfile, rates: OperatorRates, part: Parameters) -> float:
    """Seconds of a step on these parameters; nothing where no step with such state was measured."""
    kept = profile.profile
    width = "fp32" if kept.gradients(Parameters(1, 0, 0, 0, 1)) > 2 else "bf16"
    muon = kept.optimizer == "muon" if isinstance(kept, State) else profile.name.startswith("published-muon")
    matrices = part.low_matrices + part.high_matrices if muon else 0
    amounts = {f"muon with {width} state": matrices, f"adamw with {width} state": part.total - matrices}
    return sum(rates.seconds(name, amount) for name, amount in amounts.items() if amount and name in rates.rates)
