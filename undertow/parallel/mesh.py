"""The axes of a run over many ranks: what each is called, which ranks stand on it, and their process groups.

Ranks are numbered with the pipeline outermost and tensor parallelism innermost, so that those who talk most are
neighbours. The same ranks of a stage are dealt out twice: to the dense weights and to the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from undertow.config.errors import ConfigError
from undertow.config.geometry import Geometry, build_geometry, check_model
from undertow.config.model import ModelConfig
from undertow.config.parallel import ParallelConfig
from undertow.model.part import Part
from undertow.parallel.pipeline.stages import Stages, build_stages, check_torch

DENSE_AXES: tuple[str, ...] = ("pipeline", "replicate", "shard", "context", "tensor")
"""Of dense weights: `shard` ranks hold them in parts, `replicate` such groups hold the same. Both divide the data."""
EXPERT_AXES: tuple[str, ...] = ("pipeline", "expert_data", "expert")
"""Of experts: `expert` ranks hold all of them, `expert_data` such groups hold the same."""


@dataclass(frozen=True)
class Axes:
    """Widths of every axis, without a process group. Made by `build_axes`."""

    geometry: Geometry
    replicate: int
    shard: int

    @property
    def dense(self) -> tuple[int, ...]:
        """Widths of `DENSE_AXES`."""
        g = self.geometry
        return g.pipeline, self.replicate, self.shard, g.context, g.tensor

    @property
    def experts(self) -> tuple[int, ...]:
        """Widths of `EXPERT_AXES`."""
        g = self.geometry
        return g.pipeline, g.expert_data, g.expert

    def __str__(self) -> str:
        told = [*zip(DENSE_AXES, self.dense, strict=True), *zip(EXPERT_AXES[1:], self.experts[1:], strict=True)]
        return ", ".join(f"{axis} {width}" for axis, width in told if width > 1 and axis != "expert_data")

    def width(self, axis: str) -> int:
        """Ranks on an axis."""
        return dict(zip(DENSE_AXES + EXPERT_AXES, self.dense + self.experts, strict=True))[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank on every axis."""
        places = {}
        for axes, widths in ((DENSE_AXES, self.dense), (EXPERT_AXES, self.experts)):
            for i, axis in enumerate(axes):
                places[axis] = rank // prod(widths[i + 1 :]) % widths[i]
        return places


def build_axes(
    parallel: ParallelConfig, ranks: int, shard: int | None = None, model: ModelConfig | None = None
) -> Axes:
    """Axes of `parallel` over so many `ranks`; data parallelism takes what the others leave.

    `shard` of the data-parallel ranks hold dense weights in parts, by default `parallel.shard`, or else all; 1 repeats
    the weights. Raises `ConfigError` for widths that do not divide the ranks, or that `model` cannot be shared out
    over.
    """
    geometry = build_geometry(
        ranks,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        expert=parallel.expert,
        context=parallel.context,
        shard=parallel.shard if shard is None else shard,
    )
    if model is not None:
        check_model(model, geometry)
    width = geometry.shard or geometry.data
    return Axes(geometry, geometry.data // width, width)


@dataclass(frozen=True)
class Mesh:
    """Axes with the process groups of this rank. Made by `build_mesh`.

    `dense` has the axes `DENSE_AXES`, `experts` has `EXPERT_AXES`, both over all ranks. `data` are the ranks of this
    stage that have other sequences, `replicate` x `shard` of them. `stages` are those of a pipeline, if there is one.
    """

    axes: Axes
    rank: int
    dense: DeviceMesh
    experts: DeviceMesh
    data: dist.ProcessGroup
    stages: Stages | None = None

    @property
    def part(self) -> Part | None:
        """The part of the model that this rank holds; None without a pipeline, for all of it."""
        return None if self.stages is None else self.stages.part(self.place("pipeline"))

    def width(self, axis: str) -> int:
        """Ranks on an axis."""
        return self.axes.width(axis)

    def place(self, axis: str) -> int:
        """Where this rank stands on an axis, from 0."""
        return self.axes.coordinates(self.rank)[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on that axis alone."""
        return (self.dense if axis in DENSE_AXES else self.experts).get_group(axis)

    @property
    def data_place(self) -> tuple[int, int]:
        """Which part of the batch this rank has, and of how many."""
        shard = self.width("shard")
        return self.place("replicate") * shard + self.place("shard"), self.width("replicate") * shard


_UNBUILT = {"tensor": "tensor parallelism", "context": "context parallelism"}


def build_mesh(
    parallel: ParallelConfig, shard: int | None = None, model: ModelConfig | None = None, device: str = "cpu"
) -> Mesh:
    """The mesh of `parallel` over all ranks of the default process group; every rank must call it.

    Arguments and errors are those of `build_axes`; `device` is the type that carries the collectives.
    """
    axes = build_axes(parallel, dist.get_world_size(), shard, model)
    for name, told in _UNBUILT.items():
        if axes.width(name) > 1:
            raise ConfigError(f"parallel.{name} is {axes.width(name)}: {told} is not built yet; set parallel.{name}=1")
    if axes.width("pipeline") > 1:
        check_torch(parallel.schedule, torch.__version__)
    dense = init_device_mesh(device, axes.dense, mesh_dim_names=DENSE_AXES)
    experts = init_device_mesh(device, axes.experts, mesh_dim_names=EXPERT_AXES)
    data = _data_group(axes)
    stages = build_stages(parallel, model) if axes.width("pipeline") > 1 and model is not None else None
    return Mesh(axes, dist.get_rank(), dense, experts, data, stages)


def _data_group(axes: Axes) -> dist.ProcessGroup:
    """Ranks that have all but the data in common. Every rank makes every group, as torch demands."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(axes.geometry.gpus):
        at = axes.coordinates(rank)
        groups.setdefault(tuple(at[axis] for axis in ("pipeline", "context", "tensor")), []).append(rank)
    mine = [dist.new_group(ranks, group_desc="data") for ranks in groups.values()]
    own = next(i for i, ranks in enumerate(groups.values()) if dist.get_rank() in ranks)
    return cast(dist.ProcessGroup, mine[own])
