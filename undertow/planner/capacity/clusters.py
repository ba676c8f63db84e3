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
from undertow.planner.capacity.fit import Fit, about_seconds, fit_of
from undertow.planner.choice import EXPERT, TENSOR, Chosen, Options, candidates, stated
from undertow.planner.geometry import build_geometry, check_model
from undertow.planner.memory.inflight import held_by_1f1b
from undertow.planner.memory.model import Memory, RankMemory, Term
from undertow.planner.pipeline.schedules import splits_backward
from undertow.planner.subject import Subject
from undertow.planner.task import Task
from undertow.planner.tuner.tuning import Bounds

LARGEST = 4096
"""GPUs of the largest cluster that is looked at."""

AXES = ("tensor", "pipeline", "expert", "context")

NODE = 8
"""GPUs of a machine: larger clusters are whole machines."""


WIDEST_EXPERT = 32
"""Largest width of expert parallelism that is looked at; beyond `EXPERT` ranks it leaves most machines."""


def expert_widths(ranks: int, experts: int) -> list[int]:
    """Widths of expert parallelism for so many ranks of a stage: the usual one, and twice and four times `EXPERT`."""
    usual = max(n for n in range(1, EXPERT + 1) if ranks % n == 0 and experts % n == 0)
    wider = [n for n in (2 * EXPERT, WIDEST_EXPERT) if ranks % n == 0 and experts % n == 0]
    return [usual, *wider]


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


_Widths = tuple[int, int | None, int | None]
"""Tensor, pipeline and expert; a given layout says its own pipeline."""


@dataclass
class _Search:
    """Ways to run by number of GPUs, weighed once for all GPU models: bytes
    do not depend on whose memory they are in."""

    subject: Subject
    options: Options
    per_gpu: int | None
    """Sequences a GPU and step, where the batch grows with the GPUs."""
    refused: list[ConfigError] = field(default_factory=list)
    _ways: dict[tuple[int, _Widths], _Way | None] = field(default_factory=dict)
    _fixed: dict[_Widths, int] = field(default_factory=dict)

    def peaks(self, gpus: int, gpu: Gpu, limit: int | None = None) -> Iterator[tuple[Chosen, RankMemory]]:
        """Ways with their fullest rank; with a limit without those whose widths exceed it on any number of GPUs."""
        for widths in self._widths(gpus):
            if limit is not None and self._fixed.get(widths, 0) > limit:
                continue
            way = self._way(gpus, gpu, widths)
            if way is None:
                continue
            task = way.chosen[0]
            if (
                limit is not None
                and gpus > 1
                and (task.memory_model.least_state_bytes > limit or way.sample[0] > limit)
            ):
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

    def _widths(self, gpus: int) -> Iterator[_Widths]:
        """Every combination of the widths that are left open."""
        open_, model = self.options, self.subject.run.model
        pipelines: Sequence[int | None] = [open_.pipeline]
        if open_.pipeline is None and open_.layout is None:
            pipelines = [n for n in range(1, min(gpus, model.num_hidden_layers) + 1) if gpus % n == 0]
        for tensor in TENSOR if open_.tensor is None else (open_.tensor,):
            for pipeline in pipelines:
                if open_.tensor is open_.pipeline is None and gpus % (tensor * (pipeline or 1)):
                    continue
                experts: Sequence[int | None] = [open_.expert]
                if open_.expert is None and pipeline is not None:
                    experts = expert_widths(max(1, gpus // max(1, pipeline)), model.n_routed_experts)
                yield from ((tensor, pipeline, expert) for expert in experts)

    def _way(self, gpus: int, gpu: Gpu, widths: _Widths) -> _Way | None:
        """With such widths, or None where they cannot be."""
        if (gpus, widths) not in self._ways:
            said: dict[str, int | None] = dict(zip(("tensor", "pipeline", "expert"), widths, strict=True))
            if self.per_gpu is not None:
                said["global_batch"] = self.per_gpu * gpus
            found = candidates(self.subject, Pool(gpus, gpu), replace(self.options, **said), self.refused)
            self._ways[gpus, widths] = next((_Way(chosen) for chosen in found), None)
        return self._ways[gpus, widths]


def _fixed_bytes(task: Task, rank: RankMemory) -> int:
    """Bytes that are the same however many data-parallel ranks share the rest."""
    optimizer = ("optimizer state", "chunks of the optimizer state")
    full = (*optimizer, "weights", "gradient buffers", "unsharded weights", "unsharded gradients")
    shared = {"none": (), "optimizer": optimizer, "full": full}[task.profile.sharing]
    return rank.total_bytes - sum(rank.bytes_of(name) for name in shared)


def smallest_clusters(
    subject_of: Callable[[int], Subject],
    gpus: Sequence[Gpu],
    options: Options,
    *,
    largest: int = LARGEST,
    bounds: Bounds | None = None,
) -> tuple[Smallest, ...]:
    """For each GPU model the smallest of `cluster_sizes` on which a run fits, without recomputing and with every layer
    computed again, or with what `options` say alone.

    `subject_of` gives the run for a number of GPUs, on which only its batch may depend; `bounds` say how much of a
    GPU's memory may be taken, 95 % unasked. A cluster fits if `choose`
    finds a way; of all ways that fit the smallest cluster the fastest is told. What fits need not fit every larger
    cluster, for widths must divide it; so sizes are gone through from the smallest on. Two bounds skip what cannot be:
    the fullest stage has its share of the state at least, and with given widths nothing but shared state shrinks on
    more GPUs. Raises `ConfigError` where no cluster can share out the model and the batch, with the first reason.
    """
    asked = [options.recompute] if options.recompute is not None else ["none", "all"]
    if options.recompute is None and options.schedule and splits_backward(options.schedule):  # type: ignore[arg-type]
        asked = ["none"]
    subject, bounds = subject_of(NODE), bounds or Bounds()
    options = stated(subject.run, options)
    _check_widths(subject, options)
    found: list[Smallest] = []
    per_gpu = None if options.global_batch is not None else _per_gpu(subject, subject_of(2 * NODE))
    searches = {str(again): _Search(subject, replace(options, recompute=again), per_gpu) for again in asked}
    for gpu in gpus:
        limit = bounds.limit_bytes(Pool(1, gpu))
        found += [_smallest(search, gpu, limit, again, cluster_sizes(largest)) for again, search in searches.items()]
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


def _smallest(search: _Search, gpu: Gpu, limit: int, again: str, sizes: Sequence[int]) -> Smallest:
    for gpus in sizes:
        weighed = search.peaks(gpus, gpu, limit)
        if fitting := [chosen for chosen, peak in weighed if peak.total_bytes <= limit]:
            pool = Pool(gpus, gpu)
            of_gpu = [(replace(task, pool=pool, limit=limit), layout, again) for task, layout, again in fitting]
            fit = fit_of(*min(of_gpu, key=lambda chosen: about_seconds(*chosen)))
            return Smallest(gpu, again, fit, _shortage(search, gpu, limit, [n for n in sizes if n < gpus]))
    return Smallest(gpu, again, None, _shortage(search, gpu, limit, sizes))


def _shortage(search: _Search, gpu: Gpu, limit: int, sizes: Sequence[int]) -> Shortage | None:
    """What the largest of these clusters lacks that can be shared out at all."""
    for gpus in reversed(sizes):
        ranks = [peak for _, peak in search.peaks(gpus, gpu)]
        if ranks:
            return Shortage(gpus, min(ranks, key=lambda rank: rank.total_bytes), limit)
    return None
