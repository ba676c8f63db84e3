"""Memory of every rank, term by term, against what a GPU has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil
from typing import NamedTuple

from undertow.config.model import ModelConfig
from undertow.model.peak import Basis, State, peak_bytes
from undertow.model.weights import collapse_weights, layer_weights, table_weight
from undertow.planner.calibration.measured import MemoryCalibration, uncalibrated
from undertow.planner.geometry import Geometry
from undertow.planner.memory.activations import Microbatch, symmetric_heap
from undertow.planner.memory.parameters import NOTHING, RankParameters, Stage, rank_parameters, sum_parameters
from undertow.planner.memory.recompute import NONE, Recompute
from undertow.planner.memory.saved import SavedTable
from undertow.planner.memory.state import Sharing, StateProfile, state_bytes

GB, GIB = 10**9, 2**30


class Term(NamedTuple):
    """Bytes under a name. `measured`: a closed form that agrees with modules or measurements to the byte; `estimated`:
    everything else."""

    name: str
    bytes: int
    basis: Basis

    @property
    def gb(self) -> float:
        """In 10^9 bytes."""
        return self.bytes / GB

    @property
    def gib(self) -> float:
        """In 2^30 bytes."""
        return self.bytes / GIB


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of each rank of one pipeline stage; `host_bytes` lie in the memory of the host."""

    stage: int
    terms: tuple[Term, ...]
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all terms."""
        return sum(term.bytes for term in self.terms)

    def bytes_of(self, name: str) -> int:
        """Bytes of the term of that name, 0 if the rank has none."""
        return sum(term.bytes for term in self.terms if term.name == name)


@dataclass(frozen=True)
class Memory:
    """Memory of a whole run. `stages` has one entry a pipeline rank; all GPUs of a stage are alike."""

    stages: tuple[RankMemory, ...]
    ranks_per_stage: int
    limit_bytes: int
    uncalibrated: tuple[str, ...]

    @property
    def ranks(self) -> tuple[RankMemory, ...]:
        """One entry a GPU, in the order of ranks: the pipeline is the outermost axis."""
        return tuple(stage for stage in self.stages for _ in range(self.ranks_per_stage))

    @property
    def peak(self) -> RankMemory:
        """The fullest stage, the first of equals."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    def machine_host_bytes(self, gpus: int = 8) -> int:
        """Host memory of the fullest machine of so many GPUs, which hold consecutive ranks."""
        each = [rank.host_bytes for rank in self.ranks]
        return max(sum(each[first : first + gpus]) for first in range(0, len(each), gpus))

    @property
    def fits(self) -> bool:
        """Whether every rank stays within the limit."""
        return self.peak.total_bytes <= self.limit_bytes


def leaner(largest: Term) -> str:
    """What is said of state to a run that does not fit, by its largest term."""
    moved = largest.name == "optimizer state"
    return "a leaner state, or keep it on the host with --offload-optimizer" if moved else "a leaner state"


class Held(NamedTuple):
    """A stage on its rank, and how many microbatches it holds at the worst moment of the schedule.

    Where the schedule splits the backward pass, `due` are those that wait for their weight gradients alone, besides.
    """

    stage: Stage
    in_flight: int | float | Fraction
    due: int | None = None


@lru_cache(maxsize=64)
def _layers(config: ModelConfig, tensor: int, expert: int) -> tuple[RankParameters, ...]:
    """A rank's part of each layer; a search weighs many geometries that differ in other widths."""
    blocks = range(config.num_hidden_layers + config.num_nextn_predict_layers)
    cut = Geometry(tensor=tensor, expert=expert)
    return tuple(rank_parameters(layer_weights(config, layer), cut) for layer in blocks)


@dataclass(frozen=True)
class MemoryModel:
    """Memory of any division of a model into stages, for one microbatch, profile of state and calibration.

    `sharing` replaces the profile's; `deferred` sums gradients once a step, after its last microbatch, which under full
    sharing keeps all weights and gradients whole on every rank. Raises `ConfigError` on first use where the
    implementation cannot run in the geometry.
    """

    m: Microbatch
    profile: StateProfile
    calibration: MemoryCalibration | None = None
    sharing: Sharing | None = None
    deferred: bool = False

    @cached_property
    def saved(self) -> SavedTable:
        """Saved activations by place, measured ones where the calibration has them."""
        return SavedTable(self.m, self.calibration.saved if self.calibration else {})

    @cached_property
    def layers(self) -> tuple[RankParameters, ...]:
        """A rank's part of each layer, MTP blocks last."""
        geometry = self.m.geometry
        return _layers(self.m.config, geometry.tensor, geometry.expert)  # pyright: ignore[reportArgumentType]

    def parameters(self, stages: Sequence[Stage]) -> RankParameters:
        """What one rank holds of its stages, a second embedding included, for it takes memory: once a rank."""
        layers = [self.layers[layer] for stage in stages for layer in stage.layers]
        tables = any(stage.embedding or stage.borrows_embedding(self.m.config) for stage in stages)
        ends = [self.embedding] * tables + [self.head for stage in stages if stage.head]
        return sum_parameters([*layers, *ends])

    @cached_property
    def embedding(self) -> RankParameters:
        """A rank's part of the embedding."""
        return rank_parameters([table_weight(self.m.config, "embed")], self.m.geometry)

    @cached_property
    def head(self) -> RankParameters:
        """A rank's part of the output head."""
        config = self.m.config
        return rank_parameters([*collapse_weights(config), table_weight(config, "head")], self.m.geometry)

    @cached_property
    def least_state_bytes(self) -> int:
        """State of a rank if all pipeline ranks had equal shares: the fullest has no less, however layers are cut."""
        parameters = sum_parameters([*self.layers, self.embedding, self.head])
        geometry = self.m.geometry
        state = state_bytes(parameters, NOTHING, geometry, self.profile, sharing=self.sharing, deferred=self.deferred)
        held = state.weights + state.gradients + (0 if self.profile.host else state.optimizer)
        return held // geometry.pipeline

    def rank(self, number: int, held: Sequence[Held], recompute: Recompute = NONE) -> RankMemory:
        """Memory of a rank of pipeline stage `number` that holds the given stages (several with virtual stages), its
        layers in `recompute` computed again."""
        if self.exact(held):
            return RankMemory(number, self._single(recompute))
        stages = [each.stage for each in held]
        largest = max(
            (self.layers[n] for stage in stages for n in stage.layers), key=lambda p: p.total, default=NOTHING
        )
        state = state_bytes(
            self.parameters(stages),
            largest,
            self.m.geometry,
            self.profile,
            sharing=self.sharing,
            deferred=self.deferred,
        )
        terms = [
            Term("weights", state.weights, "measured"),
            Term("gradient buffers", state.gradients, "measured"),
            Term("chunks of the optimizer state", state.optimizer, "estimated")
            if self.profile.host
            else Term("optimizer state", state.optimizer, "measured"),
            Term("unsharded weights", state.unsharded_weights, "estimated"),
            Term("unsharded gradients", state.unsharded_gradients, "estimated"),
            *self._activations(held, recompute),
            *self._constants,
        ]
        return RankMemory(number, tuple(term for term in terms if term.bytes), state.host)

    def plan(
        self,
        pipeline: Sequence[Sequence[Held]],
        gpu_memory: int,
        *,
        margin: float = 0.0,
        recompute: Recompute = NONE,
    ) -> Memory:
        """Memory of every rank of a pipeline, given by rank, against `gpu_memory` bytes less a share `margin`."""
        stages = tuple(self.rank(number, held, recompute) for number, held in enumerate(pipeline))
        exact = all(self.exact(held) for held in pipeline)
        notes = () if exact else uncalibrated(self.m, self.profile, self.calibration)
        return Memory(stages, self.m.geometry.stage_ranks, int(gpu_memory * (1 - margin)), notes)

    def exact(self, held: Sequence[Held]) -> bool:
        """Whether the peak is known moment by moment: Undertow's own operators and state on one GPU."""
        own = self.m.implementation == "reference" and isinstance(self.profile.profile, State)
        return own and not self.profile.host and self.m.geometry.gpus == 1 and [each.in_flight for each in held] == [1]

    def _single(self, recompute: Recompute) -> tuple[Term, ...]:
        m, state = self.m, self.profile.profile
        assert isinstance(state, State)
        objective = replace(m.objective, recompute=m.objective.recompute | recompute.layers)
        peak = peak_bytes(m.config, m.pass_.documents, state, objective, kernels=m.kernels)
        return tuple(Term(part.name, part.bytes, part.basis) for part in peak.parts if part.bytes)

    def _activations(self, held: Sequence[Held], recompute: Recompute) -> list[Term]:
        layers = ends = transient = put_off = making = 0
        for stage, in_flight, due in held:
            saved = self.saved.stage(stage, recompute)
            layers += ceil(sum(saved.kept) * in_flight)
            ends += ceil(saved.ends * in_flight)
            transient = max(transient, saved.transient)
            if due is not None:
                deferred = self.saved.deferred(stage)
                put_off += deferred.total * due
                making = max(making, deferred.transient)
        exact = self.m.implementation == "reference" and self.m.geometry.context == 1
        return [
            Term("saved activations of layers", layers, "measured" if exact or self.saved.measured else "estimated"),
            Term("saved activations of embedding and head", ends, "measured" if exact else "estimated"),
            Term("layer that is computed again", transient, "estimated"),
            Term("kept for weight gradients", put_off, "estimated"),
            Term("gradients that are being made", making, "estimated"),
        ]

    @cached_property
    def _constants(self) -> tuple[Term, ...]:
        """What is there once, whatever the stage: buffers of the implementation, what was fitted or is estimated."""
        m, calibration = self.m, self.calibration
        heap = symmetric_heap(m.config, m.geometry, m.own) if m.implementation == "primus" else 0
        terms = [Term("symmetric heap", heap, "estimated")]
        if calibration:
            rest = calibration.constant - calibration.heap
            terms.append(Term(f"fitted constant of {calibration.name}, less its heap", rest, "estimated"))
        elif m.implementation == "reference":
            local = m.config.model_copy(update={"n_routed_experts": m.config.n_routed_experts // m.geometry.expert})
            state = self.profile.profile if isinstance(self.profile.profile, State) else State(m.dtype)
            beside = ("buffers", "held beside", "transient", "library workspaces")
            parts = peak_bytes(local, m.pass_.documents, state, m.objective, kernels=m.kernels).parts
            terms += [Term(part.name, part.bytes, "estimated") for part in parts if part.name in beside]
        return tuple(terms)
