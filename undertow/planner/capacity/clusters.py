"""How many GPUs a training run needs at least: the smallest cluster of each GPU, and what keeps a smaller one from
fitting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError
from undertow.config.gpus import Gpu
from undertow.model.weights import all_weights
from undertow.planner.choice import Chosen, Options, candidates, stated
from undertow.planner.geometry import Geometry, build_geometry, check_model
from undertow.planner.memory.inflight import held_by_1f1b
from undertow.planner.memory.model import Memory, RankMemory, Term
from undertow.planner.memory.parameters import RankParameters, rank_parameters
from undertow.planner.memory.recompute import Recompute
from undertow.planner.pipeline.layout import Layout
from undertow.planner.pipeline.run import approximate_seconds
from undertow.planner.pipeline.schedules import splits_backward
from undertow.planner.subject import Subject
from undertow.planner.task import Task
from undertow.planner.timing.costs import stage_times

LARGEST = 4096
"""GPUs of the largest cluster that is looked at."""

AXES = ("tensor", "pipeline", "expert", "context")

NODE = 8
"""GPUs of a machine: larger clusters are whole machines."""


def cluster_sizes(largest: int = LARGEST) -> tuple[int, ...]:
    """Numbers of GPUs that are looked at: 1, 2 and 4, then whole machines."""
    return tuple(n for n in chain((1, 2, 4), range(NODE, largest + 1, NODE)) if n <= largest)


@dataclass(frozen=True)
class Shortage:
    """The least full way to run on too few GPUs: its fullest rank needs more than a GPU has, most of it for `term`."""

    gpus: int
    rank: RankMemory
    limit_bytes: int

    @property
    def term(self) -> Term:
        """The largest term."""
        return max(self.rank.terms, key=lambda term: term.bytes)


@dataclass(frozen=True)
class Fit:
    """A run that fits: its task, layout, memory and seconds an iteration."""

    task: Task
    layout: Layout
    memory: Memory
    seconds: float

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of training, all tokens of the batch."""
        return self.task.tokens / (self.seconds * self.task.geometry.gpus)


@dataclass(frozen=True)
class Smallest:
    """The smallest cluster of `gpu` for a run with so much recomputed: how it fits, or None where none is large enough.

    `shortage` is of the next smaller cluster that can share out model and batch, or of the largest if none fits; None
    where there is no smaller one, or no cluster can share them out.
    """

    gpu: Gpu
    recompute: str
    fit: Fit | None
    shortage: Shortage | None


@dataclass(frozen=True)
class _Way:
    """One way to run on so many GPUs, weighed when it is needed."""

    chosen: Chosen

    @cached_property
    def sample(self) -> tuple[int, int]:
        """Of three ranks that often are the fullest of all: bytes of the fullest, and the most that are the same on any
        number of data-parallel ranks. Quick, and never too much."""
        task, layout, recompute = self.chosen
        if task.schedule != "1f1b":
            return 0, 0
        counts = layout.counts("t")
        held = held_by_1f1b(layout, task.microbatches)
        some = {0, counts.index(max(counts)), len(held) - 1}
        try:
            ranks = [task.memory_model.rank(n, held[n], recompute) for n in some]
        except ConfigError:
            return 0, 0
        return max(rank.total_bytes for rank in ranks), max(_fixed_bytes(task, rank) for rank in ranks)

    @cached_property
    def memory(self) -> Memory | ConfigError:
        """Of every rank, or why it cannot be told."""
        try:
            return self.chosen[0].memory(*self.chosen[1:])
        except ConfigError as error:
            return error


@dataclass
class _Search:
    """Ways to run by number of GPUs, weighed once for all GPU models: bytes
    do not depend on whose memory they are in."""

    subject: Subject
    options: Options
    per_gpu: int | None
    """Sequences a GPU and step, where the batch grows with the GPUs."""
    refused: list[ConfigError] = field(default_factory=list)
    _ways: dict[int, tuple[_Way, ...]] = field(default_factory=dict)
    _fixed: dict[Geometry, int] = field(default_factory=dict)
    _whole: dict[tuple[int, int], RankParameters] = field(default_factory=dict)

    def ways(self, gpus: int, gpu: Gpu) -> tuple[_Way, ...]:
        """All ways to run on `gpus`."""
        if gpus not in self._ways:
            pool = Pool(gpus, gpu)
            batch = {} if self.per_gpu is None else {"global_batch": self.per_gpu * gpus}
            found = candidates(self.subject, pool, replace(self.options, **batch), self.refused)
            self._ways[gpus] = tuple(_Way(chosen) for chosen in found)
        return self._ways[gpus]

    def peaks(self, gpus: int, gpu: Gpu, limit: int | None = None) -> Iterator[tuple[Chosen, RankMemory]]:
        """Ways with their fullest rank; with a limit without those whose widths exceed it on any number of GPUs."""
        for way in self.ways(gpus, gpu):
            task = way.chosen[0]
            widths = replace(task.geometry, data=1)
            if limit is not None and self._fixed.get(widths, 0) > limit:
                continue
            if limit is not None and gpus > 1 and (self._least_bytes(task) > limit or way.sample[0] > limit):
                if self.per_gpu:
                    self._fixed[widths] = max(self._fixed.get(widths, 0), way.sample[1])
                continue
            if isinstance(way.memory, ConfigError):
                self.refused.append(way.memory)
                continue
            if self.per_gpu and gpus > 1:
                fixed = max(_fixed_bytes(task, rank) for rank in way.memory.stages)
                self._fixed[widths] = max(self._fixed.get(widths, 0), fixed)
            yield way.chosen, way.memory.peak

    def _least_bytes(self, task: Task) -> int:
        """State of a rank if all stages had equal shares: the fullest has no less."""
        cut, profile, geometry = (task.geometry.tensor, task.geometry.expert), task.profile, task.geometry
        if cut not in self._whole:
            self._whole[cut] = rank_parameters(all_weights(task.config), geometry)
        kept, full = profile.profile, profile.sharing == "full"
        size = 0
        for part, ranks in zip(self._whole[cut], (geometry.dense_copies, geometry.expert_data), strict=True):
            size += (kept.weights(part) + kept.gradients(part)) // (ranks if full else 1)
            if not profile.host:
                size += kept.optimizer_state(part) // (1 if profile.sharing == "none" else ranks)
        return size // geometry.pipeline


def about_seconds(task: Task, layout: Layout, recompute: Recompute) -> float:
    """Seconds of an iteration in closed form, to compare ways to run."""
    stages = stage_times(task.times, layout, recompute)
    return float(approximate_seconds(stages, task.microbatches)) + max(float(stage.step) for stage in stages)


def fit_of(task: Task, layout: Layout, recompute: Recompute) -> Fit:
    """Memory and seconds of a run. Where there are many microbatches fewer are simulated, and the rest take as long as
    those in the middle of them: from there on a schedule repeats itself."""
    few, many = task.geometry.pipeline, 2 * task.geometry.pipeline
    if task.microbatches <= many:
        return Fit(task, layout, task.memory(layout, recompute), float(task.timeline(layout, recompute).seconds))
    each = {}
    for microbatches in (few, many):
        size = microbatches * task.batch.micro_batch * task.geometry.data
        shorter = replace(task, microbatch=replace(task.microbatch, batch=replace(task.batch, size=size)))
        each[microbatches] = float(shorter.timeline(layout, recompute).seconds)
    more = (task.microbatches - many) * (each[many] - each[few]) / (many - few)
    return Fit(task, layout, task.memory(layout, recompute), each[many] + more)


def _fixed_bytes(task: Task, rank: RankMemory) -> int:
    """Bytes that are the same however many data-parallel ranks share the rest."""
    optimizer = ("optimizer state", "chunks of the optimizer state")
    full = (*optimizer, "weights", "gradient buffers", "unsharded weights", "unsharded gradients")
    shared = {"none": (), "optimizer": optimizer, "full": full}[task.profile.sharing]
    return rank.total_bytes - sum(rank.bytes_of(name) for name in shared)


def smallest_clusters(
    subject_of: Callable[[int], Subject], gpus: Sequence[Gpu], options: Options, *, largest: int = LARGEST
) -> tuple[Smallest, ...]:
    """For each GPU model the smallest of `cluster_sizes` on which a run fits, without recomputing and with every layer
    computed again, or with what `options` say alone.

    `subject_of` gives the run for a number of GPUs, on which only its batch may depend. A cluster fits if `choose`
    finds a way; of all ways that fit the smallest cluster the fastest is told. What fits need not fit every larger
    cluster, for widths must divide it; so sizes are gone through from the smallest on. Two bounds skip what cannot be:
    the fullest stage has its share of the state at least, and with given widths nothing but shared state shrinks on
    more GPUs. Raises `ConfigError` where no cluster can share out the model and the batch, with the first reason.
    """
    asked = [options.recompute] if options.recompute is not None else ["none", "all"]
    if options.recompute is None and options.schedule and splits_backward(options.schedule):  # type: ignore[arg-type]
        asked = ["none"]
    subject = subject_of(NODE)
    _check_widths(subject, options)
    found: list[Smallest] = []
    per_gpu = None if options.global_batch is not None else _per_gpu(subject, subject_of(2 * NODE))
    searches = {str(again): _Search(subject, replace(options, recompute=again), per_gpu) for again in asked}
    for gpu in gpus:
        found += [_smallest(search, gpu, again, cluster_sizes(largest)) for again, search in searches.items()]
    if all(row.fit is None and row.shortage is None for row in found):
        raise next(error for search in searches.values() for error in search.refused)
    return tuple(found)


def _check_widths(subject: Subject, options: Options) -> None:
    """Raises `ConfigError` for given widths that the model does not divide into, on however many GPUs."""
    given = stated(subject.run, options)
    widths = {name: 1 if (width := getattr(given, name)) is None else width for name in AXES}
    check_model(subject.run.model, build_geometry(max(1, prod(widths.values())), **widths))


def _per_gpu(one: Subject, two: Subject) -> int | None:
    """Sequences a GPU, from the runs on one machine and on two; None where the batch is the same on both."""
    sizes = one.run.train.batch_size, two.run.train.batch_size
    return sizes[0] // NODE if sizes[1] == 2 * sizes[0] else None


def _smallest(search: _Search, gpu: Gpu, again: str, sizes: Sequence[int]) -> Smallest:
    for gpus in sizes:
        weighed = search.peaks(gpus, gpu, gpu.memory)
        if fitting := [chosen for chosen, peak in weighed if peak.total_bytes <= gpu.memory]:
            pool = Pool(gpus, gpu)
            of_gpu = [(replace(task, pool=pool), layout, recompute) for task, layout, recompute in fitting]
            fit = fit_of(*min(of_gpu, key=lambda chosen: about_seconds(*chosen)))
            return Smallest(gpu, again, fit, _shortage(search, gpu, [n for n in sizes if n < gpus]))
    return Smallest(gpu, again, None, _shortage(search, gpu, sizes))


def _shortage(search: _Search, gpu: Gpu, sizes: Sequence[int]) -> Shortage | None:
    """What the largest of these clusters lacks that can be shared out at all."""
    for gpus in reversed(sizes):
        ranks = [peak for _, peak in search.peaks(gpus, gpu)]
        if ranks:
            return Shortage(gpus, min(ranks, key=lambda rank: rank.total_bytes), gpu.memory)
    return None
