"""A call of one operator of the registry as tasks: forward, and gradients of what it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from undertow.bench.backends import ways_of
from undertow.bench.task import EXACT, OWN, PEER, Run, Task, Way, norm, relative
from undertow.bench.work import Work
from undertow.ops.registry import REFERENCE

LAUNCHES = 20
"""Calls in one graph of an operator that takes a few microseconds."""

Results = tuple[Tensor, ...]
Call = Callable[[Callable[..., Any], Sequence[Tensor]], Results]
Peer = Callable[[Sequence[Tensor]], Results]


def normal(*size: int, device: torch.device, seed: int, like: torch.dtype = torch.bfloat16) -> Tensor:
    """Seeded numbers of mean 0 and variance 1."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*size, generator=generator, device=device).to(like)


def moved(*tensors: Tensor) -> int:
    """Bytes of all of them."""
    return sum(x.nbytes for x in tensors)


class Operation:
    """`op` on seeded `leaves`: `call(function, leaves)` is its call by `function`, with results as a tuple.

    `pushes` are the gradients that come in, one for each result in floating point, of its type and shape. `others` are
    ways beside the backends by name, each from leaves to results. `calls` as in `Task`.
    """

    def __init__(
        self,
        op: str,
        shape: str,
        leaves: Sequence[Tensor],
        call: Call,
        peers: Collection[str],
        others: Mapping[str, Peer] | None = None,
        calls: int = 1,
    ) -> None:
        self.op, self.shape, self.leaves, self.call, self.calls = op, shape, list(leaves), call, calls
        self.device = leaves[0].device
        self.peers, self.others = peers, {k: peer for k, peer in (others or {}).items() if k in peers}
        self.limit = EXACT if all(x.dtype == torch.float32 for x in leaves) else OWN
        with torch.no_grad():
            self.pushes = [
                normal(*y.shape, device=self.device, seed=100 + i, like=y.dtype)
                for i, y in enumerate(call(REFERENCE[op], self.leaves))
                if y.is_floating_point()
            ]

    @cached_property
    def expected(self) -> tuple[Results, list[Tensor]]:
        """Results and gradients of the leaves, by the reference in float32."""
        leaves = [x.detach().float().requires_grad_() for x in self.leaves]
        results = self.call(REFERENCE[self.op], leaves)
        return tuple(y.detach() for y in results), _gradients(results, leaves, [x.float() for x in self.pushes])

    def forward(self, name: str, work: Work, error: Callable[[Any], float] | None = None) -> Task:
        """The task of its results; `error` in place of the comparison with the reference's."""

        def bind(compute: Peer) -> Run:
            def run() -> Results:
                with torch.no_grad():
                    return compute(self.leaves)

            return run

        return self._task(name, work, error or self._of_results, bind)

    def backward(self, name: str, work: Work, of: Collection[int] | None = None) -> Task:
        """The task of the gradients of all leaves, or of those numbered in `of`."""
        wanted = list(range(len(self.leaves))) if of is None else list(of)
        least = 1e-3 * math.hypot(*map(norm, self.pushes))

        def bind(compute: Peer) -> Run:
            leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(self.leaves)]
            results, taken = compute(leaves), [leaves[i] for i in wanted]
            return lambda: _gradients(results, taken, self.pushes, retain_graph=True)

        def error(found: Sequence[Tensor]) -> float:
            gradients = [self.expected[1][i] for i in wanted]
            return max(relative(x, y, least) for x, y in zip(found, gradients, strict=True))

        return self._task(name, work, error, bind)

    def _of_results(self, found: Results) -> float:
        return max(_apart(x, y) for x, y in zip(found, self.expected[0], strict=True))

    def _task(self, name: str, work: Work, error: Callable[[Any], float], bind: Callable[[Peer], Run]) -> Task:
        def backend(function: Callable[..., Any]) -> Run:
            return bind(lambda leaves: self.call(function, leaves))

        ways = ways_of(self.op, self.device, self.peers, backend, self.limit)
        ways |= {key: Way(lambda peer=peer: bind(peer), PEER) for key, peer in self.others.items()}
        return Task(name, self.shape, work, error, ways, self.calls)


def _gradients(
    results: Results, leaves: Sequence[Tensor], pushes: Sequence[Tensor], retain_graph: bool = False
) -> list[Tensor]:
    floating = [y for y in results if y.is_floating_point()]
    return list(torch.autograd.grad(floating, list(leaves), list(pushes), retain_graph=retain_graph))


def _apart(found: Tensor, expected: Tensor) -> float:
    """Relative error; of whole numbers infinite unless all are the same."""
    if expected.is_floating_point():
        return relative(found, expected)
    same = found.shape == expected.shape and bool((found.long() == expected.long()).all())
    return 0.0 if same else math.inf
