"""The path of routed experts: choice, order, moving rows there and back, and the products of each expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from undertow.bench.backends import limit_of, own, ways_of
from undertow.bench.fusions import Sizes
from undertow.bench.operation import LAUNCHES, Operation, Results, moved, normal
from undertow.bench.task import Absent, Run, Task, Way, relative
from undertow.bench.work import Work
from undertow.ops.reference.experts import Dispatch
from undertow.ops.registry import BACKENDS, REFERENCE

EXPERTS = (32, 256)
TINY_EXPERTS = (4, 8)
"""The same for a CPU. The last is what the router chooses from."""
_SCALE = 1.5


def router_tasks(
    s: Sizes, experts: int, lengths: Sequence[int], device: torch.device, peers: Collection[str]
) -> Iterator[Task]:
    """The choice with its weights, its gradient, and the order of the rows that follows from it."""
    tokens = sum(lengths)
    logits = normal(tokens, experts, device=device, seed=1, like=torch.float32)
    bias = 0.01 * normal(experts, device=device, seed=2, like=torch.float32)
    shape, route = f"{tokens} tokens, {s.choices} of {experts}", REFERENCE["route"]
    choose = Operation(
        "route", shape, (logits,), lambda op, leaves: op(leaves[0], bias, s.choices, _SCALE), peers, calls=LAUNCHES
    )
    best, _, scores = choose.expected[0]

    def of_choice(found: Results) -> float:
        """Between numbers that are all but equal the choice is free, so that it is judged by its scores; weights by
        the choice that was made."""
        chosen, weights, made = found
        whole = chosen.sort(-1).values
        outside = (chosen < 0) | (chosen >= experts)
        if chosen.shape != best.shape or bool(outside.any() | (whole[:, 1:] == whole[:, :-1]).any()):
            return math.inf
        picked = (scores + bias).gather(1, chosen.long()).sum(-1)
        fitting = route(logits, bias, s.choices, _SCALE, chosen.long())[1]
        apart = relative(picked, (scores + bias).gather(1, best).sum(-1))
        return max(apart, relative(weights, fitting), relative(made, scores))

    work = Work(moved(logits, bias, *choose.pushes) + 8 * best.numel())
    yield choose.forward("router forward", work, of_choice)
    given = Operation(
        "route", shape, (logits,), lambda op, leaves: op(leaves[0], None, s.choices, _SCALE, best), peers,
        calls=LAUNCHES,
    )  # fmt: skip
    yield given.backward("router backward", Work(moved(logits, *given.pushes, logits) + 8 * best.numel()))
    yield _order_task(best, shape, experts, peers)
    yield _both_task(logits, bias, s.choices, shape, peers)


def _order_task(best: Tensor, shape: str, experts: int, peers: Collection[str]) -> Task:
    expected = REFERENCE["dispatch_order"](best, experts)

    def bind(order: Callable[..., Dispatch]) -> Run:
        return lambda: order(best, experts)

    def error(found: Dispatch) -> float:
        pairs = zip(_parts(found), _parts(expected), strict=True)
        return 0.0 if all(torch.equal(x.long(), y) for x, y in pairs) else math.inf

    ways = ways_of("dispatch_order", best.device, peers, bind)
    return Task("order", shape, Work(moved(best, *_parts(expected))), error, ways, calls=LAUNCHES)


def _both_task(logits: Tensor, bias: Tensor, k: int, shape: str, peers: Collection[str]) -> Task:
    """One after the other, as in a step: less the time of the router alone, it is what the order adds."""
    device, experts = logits.device, logits.shape[1]

    def bind(backend: str) -> Run:
        route, order = own("route", backend, device), own("dispatch_order", backend, device)

        def run() -> tuple[Tensor, Dispatch]:
            chosen = route(logits, bias, k, _SCALE)[0]
            return chosen, order(chosen, experts)

        return run

    def error(found: tuple[Tensor, Dispatch]) -> float:
        chosen, order = found
        pairs = zip(_parts(order), _parts(REFERENCE["dispatch_order"](chosen, experts)), strict=True)
        return 0.0 if all(torch.equal(x.long(), y.long()) for x, y in pairs) else math.inf

    backends = [name for name in BACKENDS if name != "reference" or name in peers]
    ways = {name: Way(lambda name=name: bind(name), limit_of(name)) for name in backends}
    moves = moved(logits, bias, logits) + 16 * len(logits) * k
    return Task("router and order", shape, Work(moves), error, ways, calls=LAUNCHES)


def _parts(order: Dispatch) -> tuple[Tensor, Tensor, Tensor]:
    return order.choice, order.slot, order.counts


def _order(tokens: int, choices: int, experts: int, device: torch.device) -> Dispatch:
    """Of a random choice among equals, so that every expert has another number of rows."""
    chosen = normal(tokens, experts, device=device, seed=7, like=torch.float32).topk(choices).indices
    return REFERENCE["dispatch_order"](chosen, experts)


def permute_tasks(
    s: Sizes, experts: int, lengths: Sequence[int], device: torch.device, peers: Collection[str]
) -> Iterator[Task]:
    """Rows of tokens to experts, sums of them back, and the weights of the choices."""
    tokens = sum(lengths)
    order = _order(tokens, s.choices, experts, device)
    x = normal(tokens, s.width, device=device, seed=1)
    rows = normal(tokens * s.choices, s.width, device=device, seed=2)
    weights = normal(tokens, s.choices, device=device, seed=3, like=torch.float32).sigmoid()
    shape = f"{len(rows)} x {s.width}"
    token = order.choice // s.choices

    def call(op: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Results:
        return (op(leaves[0], order),)

    o = Operation("permute", shape, (x,), call, peers, {"torch": lambda leaves: (leaves[0].index_select(0, token),)})
    yield o.forward("permute forward", Work(moved(x, *o.pushes, order.slot)))
    yield o.backward("permute backward", Work(moved(*o.pushes, x, order.slot)))
    o = Operation("unpermute", shape, (rows,), call, peers)
    yield o.forward("unpermute forward", Work(moved(rows, *o.pushes, order.slot)))
    yield o.backward("unpermute backward", Work(moved(*o.pushes, rows, order.slot)))
    o = Operation("permute_weights", f"{len(rows)} weights", (weights,), call, peers, calls=LAUNCHES)
    yield o.forward("permute weights forward", Work(moved(weights, *o.pushes, order.slot)))
    yield o.backward("permute weights backward", Work(moved(*o.pushes, weights, order.slot)))


def expert_tasks(
    s: Sizes, experts: Sequence[int], lengths: Sequence[int], device: torch.device, peers: Collection[str]
) -> Iterator[Task]:
    """The two products of an expert, gradients of rows and of weights apart."""
    for count in experts:
        counts = _order(sum(lengths), s.choices, count, device).counts
        yield from _product_tasks("fc1", counts, s.width, 2 * s.inner, peers)
        yield from _product_tasks("fc2", counts, s.inner, s.width, peers)


def _product_tasks(name: str, counts: Tensor, inside: int, out: int, peers: Collection[str]) -> Iterator[Task]:
    device, rows = counts.device, int(counts.sum())
    x = normal(rows, inside, device=device, seed=1)
    weight = normal(len(counts), out, inside, device=device, seed=2).mul_(inside**-0.5)
    products = 2.0 * rows * inside * out

    def torch_grouped(leaves: Sequence[Tensor]) -> Results:
        if device.type == "cpu" or not hasattr(torch, "_grouped_mm"):
            raise Absent("torch._grouped_mm is taken on a GPU, from torch 2.8 on")
        grouped: Any = torch._grouped_mm  # type: ignore[reportPrivateImportUsage]
        return (grouped(leaves[0], leaves[1].mT, offs=ends),)

    ends = counts.cumsum(0).int()
    shape = f"{rows} rows of {len(counts)} experts, {inside} to {out}"
    o = Operation(
        "grouped_linear", shape, (x, weight), lambda op, leaves: (op(*leaves, counts),), peers,
        {"torch": torch_grouped},
    )  # fmt: skip
    yield o.forward(f"{name} forward", Work(moved(x, weight, *o.pushes), products, products))
    yield o.backward(f"{name} gradient of rows", Work(moved(weight, *o.pushes, x), products, products), of=(0,))
    yield o.backward(f"{name} gradient of weights", Work(moved(x, *o.pushes, weight), products, products), of=(1,))
