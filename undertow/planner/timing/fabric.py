"""How fast GPUs send: links inside a machine, one network card a GPU between machines.

All constants are priors, not measurements: the published communication model of the framework that ran the measured
pretraining (a card of 50 GB/s one way for each GPU, 0.45 us inside a machine, 2 us across).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from undertow.config.gpus import Gpu

NIC_BYTES_PER_SECOND = 50e9
"""One way, of the network card that each GPU has for itself."""
LATENCY_INSIDE, LATENCY_ACROSS = 0.45e-6, 2e-6
"""Seconds of one step of a collective, inside a machine and across."""


class Group(NamedTuple):
    """Ranks that exchange something: `ranks` of them, each `stride` GPUs behind the last."""

    ranks: int
    stride: int = 1


@dataclass(frozen=True)
class Fabric:
    """Rates one way of one GPU in bytes a second. `node` are the GPUs that `link` joins; on a `mesh` each pair has its
    own part of it, behind a switch any pair has all."""

    link: float
    node: int
    mesh: bool = False
    nic: float = NIC_BYTES_PER_SECOND

    def inside(self, group: Group) -> int:
        """Ranks of a group that share a machine."""
        return min(group.ranks, max(1, self.node // group.stride))

    def _link(self, ranks: int) -> float:
        """Rate among so many GPUs of a machine."""
        return self.link * min(1.0, (ranks - 1) / (self.node - 1)) if self.mesh and self.node > 1 else self.link

    def gather_seconds(self, size: float, group: Group) -> float:
        """Seconds of an all-gather to `size` bytes, or of a reduce-scatter of as many.

        A ring inside each machine, `(k - 1) / k` of the bytes over the link, and then one across n machines, in which
        each GPU has a k-th of the bytes: `(n - 1) / n` of that over its card.
        """
        near = self.inside(group)
        machines = -(-group.ranks // near)
        seconds = 0.0
        if not size:
            return seconds
        if near > 1:
            seconds += size * (near - 1) / near / self._link(near) + (near - 1) * LATENCY_INSIDE
        if machines > 1:
            seconds += size / near * (machines - 1) / machines / self.nic + (machines - 1) * LATENCY_ACROSS
        return seconds

    def exchange_seconds(self, size: float, group: Group) -> float:
        """Seconds of an all-to-all in which each rank deals `size` bytes out evenly to all of the group.

        What stays in the machine and what leaves it go at the same time.
        """
        near = self.inside(group)
        seconds = 0.0
        if near > 1:
            seconds = size * (near - 1) / group.ranks / self._link(near) + LATENCY_INSIDE
        if group.ranks > near:
            seconds = max(seconds, size * (group.ranks - near) / group.ranks / self.nic + LATENCY_ACROSS)
        return seconds

    def send_seconds(self, size: float, group: Group) -> float:
        """Seconds in which every rank of a group sends `size` bytes to the next: those at the end of a machine are the
        slowest."""
        if group.ranks == 1:
            return 0.0
        if self.inside(group) < group.ranks:
            return size / self.nic + LATENCY_ACROSS
        return size / self._link(2) + LATENCY_INSIDE


def fabric_of(gpu: Gpu) -> Fabric:
    """The fabric of machines of a GPU. AMD's join theirs in a full mesh, the others by a switch."""
    return Fabric(gpu.link, gpu.domain, mesh=gpu.arch.startswith("gfx"))
