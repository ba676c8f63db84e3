"""What of a plan no measurement covers, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log

from undertow.config.gpus import GPUS
from undertow.model.parameters import closed_counts
from undertow.planner.memory.model import Memory
from undertow.planner.pipeline.schedules import splits_backward
from undertow.planner.task import Task
from undertow.planner.timing.communication import copies, expert_group
from undertow.planner.timing.fabric import NIC_BYTES_PER_SECOND, fabric_of
from undertow.planner.timing.operators import OperatorRates, rows_of_expert

_NIC = f"{NIC_BYTES_PER_SECOND / 1e9:.0f} GB/s a GPU, which was not measured"


def notes(task: Task, memory: Memory) -> tuple[str, ...]:
    """Sentences that begin with `memory:`, `time:` or `gpu:`; none for a run as it was measured."""
    return (*task.remarks, *memory.uncalibrated, *_memory(task), *_time(task), *_traffic(task), *_gpu(task))


def gathered(rows: Mapping[tuple[str, str], tuple[Task, Memory]]) -> tuple[str, ...]:
    """Sentences about rows of a table by the names of two columns, each once, with the rows where they are not all; of
    a first name whose rows all are, that name alone."""
    about: dict[str, list[tuple[str, str]]] = {}
    for row, each in rows.items():
        for note in dict.fromkeys(notes(*each)):
            about.setdefault(note, []).append(row)
    return tuple(note if len(of) == len(rows) else f"{note} [{_told(of, rows)}]" for note, of in about.items())


def _told(of: Sequence[tuple[str, str]], rows: Iterable[tuple[str, str]]) -> str:
    here, everywhere = Counter(first for first, _ in of), Counter(first for first, _ in rows)
    whole = {first for first in here if here[first] == everywhere[first]}
    return ", ".join(dict.fromkeys(first if first in whole else f"{first} {second}" for first, second in of))


def scaled(task: Task) -> bool:
    """Whether the rates are those of another GPU, in proportion."""
    return task.rates.matrix_tflops.mark == "scaled"


def _memory(task: Task) -> Iterator[str]:
    if task.profile.host:
        yield "memory: chunks of 256 MiB of the optimizer state, two at a time, are on the GPU; that was not measured"
    if splits_backward(task.schedule):
        yield f"memory: under {task.schedule} all that is saved counts until its weight gradient: an upper bound"
    if task.calibration.of_operators:
        return
    measured, m = task.calibration.measured, task.microbatch
    if m.implementation == "reference" != measured.implementation and task.geometry.gpus > 1:
        yield (
            "memory: saved activations and transients are those of Undertow's own operators; --implementation "
            f"{measured.implementation} --state {measured.profile.name} gives the memory of the measured runs"
        )
    ratio = closed_counts(task.config).total / closed_counts(measured.config).total
    if (constant := task.memory_model.calibration) and not 0.5 < ratio < 2:
        yield (
            f"memory: the constant of {constant.constant / 1e9:.1f} GB is that of {measured.preset}, of another size; "
            "--implementation reference goes without it"
        )
    home, here = measured.gpu.name, task.pool.gpu.name
    if task.memory_model.calibration is not None and home != here:
        yield f"memory: the constant of implementation {task.microbatch.implementation} is {home}'s, not {here}'s"


def _time(task: Task) -> Iterator[str]:
    if task.profile.host:
        yield "time: moving the optimizer state from the host and back once an iteration is not in the rates"
    measured, m, rates = task.calibration.measured, task.microbatch, task.calibration.rates
    if scaled(task):
        why = task.rates.matrix_tflops.source.partition(";")[0]
        yield f"time: rates of {task.pool.gpu.name} are guessed, {why} by the peak in BF16"
    if rates.operators is not None:
        yield from _operators(task, rates.operators)
        return
    if not rates.covers(task.config, task.batch.sequence_length) and rates.matrix_tflops.mark == "fitted":
        shape = f"{measured.preset} at {measured.sequence_length} tokens"
        yield f"time: rates were fitted to {shape}; this is another shape"
    if m.implementation == "reference" != measured.implementation and m.kernels:
        yield (
            f"time: rates are those of implementation {measured.implementation}, not of Undertow's kernels; "
            "--calibrate takes what undertow bench kernels measures of these"
        )
    elif m.implementation == "reference" != measured.implementation:
        yield (
            f"time: rates are those of fused kernels ({measured.implementation}); Undertow's plain operators reached a "
            "small fraction of them on an H200 (docs/results/training.md), so the run takes much longer"
        )
    elif m.implementation != measured.implementation:
        yield f"time: rates are those of implementation {measured.implementation}; {m.implementation} was not measured"
    if m.dtype != "bfloat16":
        yield f"time: rates are those of bfloat16; the run is in {m.dtype}"
    if task.batch.micro_batch != measured.micro_batch:
        yield (
            f"time: micro-batch is {task.batch.micro_batch}, {measured.micro_batch} was measured; work is taken in "
            "proportion"
        )
    if all(task.schedule != row.schedule for row in measured.rows):
        ran = ", ".join(sorted({row.schedule for row in measured.rows}))
        yield f"time: schedule {task.schedule} is simulated; the measured runs had {ran}"
    for warning in task.calibration.warnings:
        about = "memory" if warning.startswith("peak_bytes") else "time"
        yield f"{about}: calibration {measured.name}: {warning}"
    indexer = (task.config.indexer, task.frozen_indexer)
    usual = (measured.config.indexer, measured.frozen_indexer)
    if indexer != usual:
        yield (
            f"time: the indexer is {_indexer(*indexer)}, the measured runs had {_indexer(*usual)}; its operations "
            "count at the fitted rate"
        )


def _operators(task: Task, operators: OperatorRates) -> Iterator[str]:
    """What rates of single operators do not know of a run."""
    m, config = task.microbatch, task.config
    measured, name = task.calibration.measured, task.calibration.name
    yield (
        f"time: calibration {name} adds up operators that were measured one by one; launches, waits of the host, "
        "residual sums and casts are not counted, so that the run takes longer"
    )
    yield f"memory: operators say nothing about it; saved activations are those of implementation {m.implementation}"
    fixed = {"hidden_size", "num_attention_heads", "head_dim", "moe_intermediate_size", "index_n_heads", "vocab_size"}
    if config.model_dump(include=fixed) != measured.config.model_dump(include=fixed):
        yield f"time: operators were measured at the widths of {measured.preset}; these are others"
    if task.batch.sequence_length != measured.sequence_length:
        yield f"time: attention was measured at {measured.sequence_length:,} tokens; it is taken by its operations"
    tokens = m.rows / task.geometry.tensor
    rows, known = rows_of_expert(config, tokens, task.geometry.expert), operators.experts
    near = min(known, key=lambda measured: abs(log(measured / rows)), default=rows)
    if not 0.5 <= rows / near <= 2:
        yield f"time: an expert gets {rows:,.0f} rows; rates of its products were measured at {near:,.0f}"
    if m.dtype != "bfloat16":
        yield f"time: rates are those of bfloat16; the run is in {m.dtype}"
    if task.geometry.tensor * task.geometry.context > 1:
        yield "time: tensor and context parallelism divide work evenly; what ranks send for them is estimated"
    if task.geometry.gpus > 1:
        yield f"time: all that GPUs send each other is priced by priors, between machines at {_NIC}"
    for warning in task.calibration.warnings:
        yield f"time: calibration {name}: {warning}"


def _indexer(variant: str, frozen: bool) -> str:
    return f"{variant}, {'frozen' if frozen else 'learning'}"


def _traffic(task: Task) -> Iterator[str]:
    """Which communication is priced by priors, where it is beyond that of the measured runs."""
    if task.calibration.of_operators:
        return
    geometry, measured = task.geometry, task.calibration.measured
    for name in ("tensor", "context"):
        value, usual = getattr(geometry, name), getattr(measured.geometry, name)
        if value != usual:
            yield f"time: {name} is {value}, {usual} was measured; work is divided evenly, what ranks send is estimated"
    fabric = fabric_of(task.pool.gpu)
    experts = expert_group(geometry)
    if geometry.expert != measured.geometry.expert:
        usual = measured.geometry.expert
        yield f"time: expert is {geometry.expert}, {usual} was measured; the exchange of its tokens is estimated"
    if fabric.inside(experts) < experts.ranks:
        yield f"time: expert {geometry.expert} crosses machines of {fabric.node}; its exchange is priced at {_NIC}"
    kinds = ("dense weights", "experts")
    pairs = zip(kinds, copies(geometry), copies(measured.geometry), strict=True)
    beyond = [kind for kind, here, there in pairs if here.ranks > there.ranks]
    if beyond:
        yield f"time: gradient sums of {' and '.join(beyond)} over more ranks than measured are priced at {_NIC}"
    wide = geometry.pipeline > 1 and measured.transfer_seconds == 0
    usual = geometry.pipeline == measured.geometry.pipeline and any(r.schedule == task.schedule for r in measured.rows)
    if wide and not usual:
        yield "time: transfers between stages count as 0, for the measured rows do not tell them"


def _gpu(task: Task) -> Iterator[str]:
    gpu = task.pool.gpu
    if unsure := [figure for figure in ("memory", "bf16") if gpu.source(figure) in ("unknown", "computed")]:
        told = f"gpu: {' and '.join(unsure)} of {gpu.name}"
        if any((gpu.name, gpu.sources) == (known.name, known.sources) for known in GPUS):
            yield f"{told}: no vendor figure ({', '.join(map(gpu.source, unsure))})"
        else:
            yield f"{told}: as its file says, without a `source`"
