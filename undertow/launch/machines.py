"""Machines that a run is started on: how many, with how many GPUs each, and of which kind."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.config.clusters import LARGEST_POOL, Pool, parse_cluster
from undertow.config.errors import InputError
from undertow.config.schema import RunConfig

USUAL = 8
"""GPUs of a machine where nobody says how many."""


@dataclass(frozen=True)
class Machines:
    """`nodes` machines with `gpus_per_node` GPUs of one kind each."""

    nodes: int
    gpus_per_node: int
    gpu: str

    @property
    def gpus(self) -> int:
        """All GPUs, one process each."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.gpus}x{self.gpu}"


def stated_pool(config: RunConfig) -> Pool | None:
    """The GPUs that the recipe is for, where `parallel.gpus` states any."""
    return None if config.parallel.gpus is None else parse_cluster(config.parallel.gpus)[0]


def gpus_of_a_node(config: RunConfig, given: int | None) -> int:
    """GPUs of a machine: those given, or as many as the recipe is for, 8 at most, or 8."""
    pool = stated_pool(config)
    return given or (min(USUAL, pool.count) if pool else USUAL)


def machines_of(config: RunConfig, nodes: int, gpus_per_node: int | None, gpu: str | None) -> Machines:
    """The machines of a launch; what is None is the recipe's.

    Raises `InputError` where nobody says which GPUs these are, `ConfigError` for a kind that is not known.
    """
    pool = stated_pool(config)
    if gpu is None and pool is None:
        raise InputError(
            "no GPUs: the recipe states none; say which the nodes have, as --gpu H200, or set parallel.gpus=32xMI355X"
        )
    each = gpus_of_a_node(config, gpus_per_node)
    if nodes * each > LARGEST_POOL:
        raise InputError(f"--nodes {nodes} of {each} GPUs each are {nodes * each}; allowed: {LARGEST_POOL} GPUs in all")
    kind = parse_cluster(f"1x{gpu}")[0].gpu.name if gpu else pool.gpu.name  # type: ignore[union-attr]
    return Machines(nodes, each, kind)
