"""What of a plan no measurement covers, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from undertow.planner.memory import Memory
from undertow.planner.rates import MI355X_V4_FLASH
from undertow.planner.schedules import splits_backward
from undertow.planner.task import Task

GPUS_MEASURED = 32
"""GPUs of the runs that the rates were fitted to."""

NODE = 8
"""GPUs of a machine: expert parallelism over more crosses the network."""


def notes(task: Task, memory: Memory) -> tuple[str, ...]:
    """Sentences that begin with `memory:`, `time:` or `gpu:`; none for a run as it was measured."""
    return (*memory.uncalibrated, *_memory(task), *_time(task), *_gpu(task))


def scaled(task: Task) -> bool:
    """Whether the rates are those of another GPU, in proportion."""
    return task.rates.matrix_tflops.mark == "scaled"


def _memory(task: Task) -> Iterator[str]:
    if splits_backward(task.schedule):
        yield f"memory: under {task.schedule} all that is saved counts until its weight gradient: an upper bound"
    if task.memory_model.calibration is not None and scaled(task):
        home, here = MI355X_V4_FLASH.gpu, task.pool.gpu.name
        yield f"memory: the constant of implementation {task.microbatch.implementation} is {home}'s, not {here}'s"


def _time(task: Task) -> Iterator[str]:
    fitted, m, geometry = MI355X_V4_FLASH, task.microbatch, task.geometry
    if scaled(task):
        why = task.rates.matrix_tflops.source.partition(";")[0]
        yield f"time: rates of {task.pool.gpu.name} are guessed, {why} by the peak in BF16"
    if not fitted.covers(task.config, task.batch.sequence_length):
        yield f"time: rates were fitted to {fitted.preset} at {fitted.sequence_length} tokens; this is another shape"
    if m.implementation != "primus":
        yield f"time: rates are those of implementation primus, with fused kernels; {m.implementation} was not measured"
    if m.dtype != "bfloat16":
        yield f"time: rates are those of bfloat16; the run is in {m.dtype}"
    usual = {"tensor": 1, "context": 1, "micro-batch": 1}
    given = {"tensor": geometry.tensor, "context": geometry.context, "micro-batch": task.batch.micro_batch}
    for name, value in given.items():
        if value != usual[name]:
            yield f"time: {name} is {value}; its cost or gain was not measured, work is taken as divided evenly"
    if geometry.expert > NODE:
        yield f"time: expert {geometry.expert} crosses machines of {NODE}; the network is not in the rates"
    if task.schedule != "1f1b":
        yield f"time: schedule {task.schedule} is simulated; the measured runs had 1f1b"
    if geometry.gpus > GPUS_MEASURED:
        yield f"time: {geometry.gpus:,} GPUs; {GPUS_MEASURED} were measured, gradient sums over more do not count"
    if not scaled(task) and not (task.frozen_indexer and task.config.indexer == "own_rank"):
        yield "time: the measured runs had the own-rank indexer, frozen; another, or one that learns, adds up to 2 %"


def _gpu(task: Task) -> Iterator[str]:
    gpu = task.pool.gpu
    if unsure := [figure for figure in ("memory", "bf16") if gpu.source(figure) in ("unknown", "computed")]:
        yield f"gpu: {' and '.join(unsure)} of {gpu.name}: no vendor figure ({', '.join(map(gpu.source, unsure))})"
