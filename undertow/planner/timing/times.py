"""Seconds of a run's parts: what they compute, and what they send beyond the runs behind the rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from undertow.config.gpus import Gpu
from undertow.planner.calibration.measured import Calibration
from undertow.planner.memory.model import MemoryModel
from undertow.planner.memory.recompute import Module
from undertow.planner.timing.communication import Communication
from undertow.planner.timing.costs import MicrobatchShape, ModelTimes, model_times
from undertow.planner.timing.fabric import Group, fabric_of
from undertow.planner.timing.update import with_update


def run_times(memory: MemoryModel, gpu: Gpu, calibration: Calibration, *, frozen_indexer: bool = False) -> ModelTimes:
    """Seconds of every layer, of head and embedding for one microbatch, and once an iteration.

    `memory` has model, geometry, batch and what ranks share. The operations are those of the model's own indexer,
    learning or frozen; a stage passes all streams on, in proportion to what the calibration measured.
    """
    m, measured = memory.m, calibration.measured
    geometry = m.geometry
    computed = computed_times(memory, gpu, calibration, frozen_indexer=frozen_indexer)
    sending = Communication(memory, fabric_of(gpu), measured, frozen_indexer)
    blocks = tuple(sending.block(layer, time) for layer, time in enumerate(computed.blocks))
    transfer = measured.transfer_seconds * m.streams / measured.microbatch().streams if geometry.pipeline > 1 else 0.0
    if calibration.of_operators:  # those were measured with nothing sent
        transfer = sending.fabric.send_seconds(m.streams, Group(geometry.pipeline, geometry.stage_ranks))
    modules = tuple(_sent_again(each, sending.experts) for each in computed.modules)
    return replace(
        computed,
        blocks=blocks,
        head=sending.head(computed.head),
        embedding=sending.embedding(computed.embedding),
        transfer=transfer,
        modules=modules,
    )


def computed_times(
    memory: MemoryModel, gpu: Gpu, calibration: Calibration, *, frozen_indexer: bool = False
) -> ModelTimes:
    """As `run_times`, if ranks sent nothing but what the rates contain."""
    m = memory.m
    ranks = m.geometry.sequence_ranks
    shape = MicrobatchShape(
        m.config, m.batch.sequence_length, m.batch.micro_batch, ranks, frozen_indexer, m.geometry.expert
    )
    rates = calibration.rates_of(gpu)
    times = model_times(shape, rates)
    if rates.operators is None:
        return times
    update = partial(with_update, memory, rates.operators)
    return replace(
        times,
        blocks=tuple(map(update, memory.layers, times.blocks)),
        head=update(memory.head, times.head),
        embedding=update(memory.embedding, times.embedding),
    )


def _sent_again(modules: Mapping[Module, float], seconds: float) -> Mapping[Module, float]:
    """Seconds of modules, experts that are computed again having their tokens sent again."""
    return {module: time + seconds if module == "moe" else time for module, time in modules.items()}
