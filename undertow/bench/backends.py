"""The backends of the registry as ways of a task."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from undertow.bench.task import OWN, PEER, Absent, Run, Way
from undertow.ops import Ops
from undertow.ops.registry import BACKENDS, choose


def own(op: str, backend: str, device: torch.device) -> Callable[..., Any]:
    """`op` by `backend`, with the reference's signature. Raises `Absent` with the registry's reason."""
    refused = choose(op, device).refused
    if backend in refused:
        raise Absent(refused[backend])
    return getattr(Ops({op: backend}, device=device), op)


def limit_of(backend: str, own: float = OWN) -> float:
    """The error that a backend may have, `own` for our kernels. The reference is judged as a peer: on bfloat16 inputs
    it rounds its output before gradients are taken, which our kernels do not."""
    return PEER if backend == "reference" else own


def ways_of(
    op: str, device: torch.device, peers: Collection[str], bind: Callable[[Callable[..., Any]], Run], limit: float = OWN
) -> dict[str, Way]:
    """A way for every backend, the reference only where it is among the `peers`. `bind` makes of an operator what is
    timed; our kernels may be off by `limit`."""

    def way(backend: str) -> Way:
        return Way(lambda: bind(own(op, backend, device)), limit_of(backend, limit))

    return {backend: way(backend) for backend in BACKENDS if backend != "reference" or backend in peers}
