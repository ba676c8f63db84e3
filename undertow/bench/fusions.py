"""The small operators of a layer: norms, rotary embedding, hyper-connections, pooling, gated activation.

All are bound by memory. Bytes are those of `work`: of backward what comes in from above, what it needs of the inputs,
and the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from undertow.bench.operation import LAUNCHES, Operation, moved, normal
from undertow.bench.task import Task
from undertow.bench.work import Work
from undertow.ops.segments import Segments

_EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Widths of a model: of a stream, heads and their width, rotated pairs of a head, streams, choices of a token,
    inner width of an expert, index head; tokens of an entry in CSA and HCA."""

    width: int = 4096
    heads: int = 64
    head: int = 512
    pairs: int = 32
    streams: int = 4
    choices: int = 6
    inner: int = 2048
    index: int = 128
    ratios: tuple[int, int] = (4, 128)
    limit: float = 10.0


FLASH = Sizes()
TINY = Sizes(width=32, heads=2, head=16, pairs=4, choices=2, inner=16, index=8, ratios=(4, 16))
"""The same for a CPU."""


def tables(tokens: int, pairs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `[tokens, pairs]` angles, float32."""
    angle = torch.arange(tokens, device=device)[:, None] * 1e4 ** -torch.linspace(0, 1, pairs, device=device)
    return angle.cos(), angle.sin()


def norm_tasks(s: Sizes, lengths: Sequence[int], device: torch.device, peers: Collection[str]) -> Iterator[Task]:
    """The norm of a layer's input, that of query heads, and the latter with the rotary embedding in it."""
    tokens = sum(lengths)
    x = normal(tokens, s.width, device=device, seed=1)
    weight = 1 + 0.1 * normal(s.width, device=device, seed=2)
    o = Operation(
        "rms_norm", f"{tokens} x {s.width}", (x, weight), lambda op, leaves: (op(*leaves, _EPS),), peers,
        {"torch": lambda leaves: (functional.rms_norm(leaves[0], (s.width,), leaves[1], _EPS),)},
    )  # fmt: skip
    yield o.forward("norm forward", Work(moved(x, weight, *o.pushes)))
    yield o.backward("norm backward", Work(moved(x, weight, *o.pushes, x, weight)))
    q = normal(tokens, s.heads, s.head, device=device, seed=3)
    shape = f"{tokens * s.heads} x {s.head}"
    o = Operation(
        "rms_norm", shape, (q,), lambda op, leaves: (op(leaves[0], None, _EPS),), peers,
        {"torch": lambda leaves: (functional.rms_norm(leaves[0], (s.head,), None, _EPS),)},
    )  # fmt: skip
    yield o.forward("norm of heads forward", Work(moved(q, *o.pushes)))
    yield o.backward("norm of heads backward", Work(moved(q, *o.pushes, q)))
    turn = tables(tokens, s.pairs, device)
    o = Operation("head_norm_rotary", shape, (q,), lambda op, leaves: (op(leaves[0], *turn, _EPS),), peers)
    yield o.forward("norm of heads and rotary forward", Work(moved(q, *turn, *o.pushes)))
    yield o.backward("norm of heads and rotary backward", Work(moved(q, *turn, *o.pushes, q)))


def rotary_tasks(s: Sizes, lengths: Sequence[int], device: torch.device, peers: Collection[str]) -> Iterator[Task]:
    """Rotating back, as attention's outputs are, out of place."""
    tokens = sum(lengths)
    x, turn = normal(tokens, s.heads, s.head, device=device, seed=1), tables(tokens, s.pairs, device)
    shape = f"{tokens} x {s.heads} x {s.head}, {2 * s.pairs} rotated"
    o = Operation("rotary", shape, (x,), lambda op, leaves: (op(leaves[0], *turn, inverse=True),), peers)
    yield o.forward("rotary forward", Work(moved(x, *turn, *o.pushes)))
    yield o.backward("rotary backward", Work(moved(*turn, *o.pushes, x)))


def hyper_tasks(s: Sizes, lengths: Sequence[int], device: torch.device, peers: Collection[str]) -> Iterator[Task]:
    """What a sub-layer reads of the streams, and what it writes back. The gradient that the latter sends to the streams
    is added within the backward pass of the former, as in a model."""
    tokens, n = sum(lengths), s.streams
    rows, shape = (2 + n) * n, f"{tokens} x {n} x {s.width}"

    def exact(*size: int, seed: int) -> Tensor:
        return normal(*size, device=device, seed=seed, like=torch.float32)

    streams = normal(tokens, n, s.width, device=device, seed=1)
    inputs = (
        streams, exact(rows, n * s.width, seed=2) * (n * s.width) ** -0.5, exact(3, seed=3), exact(rows, seed=4),
        1 + 0.1 * normal(s.width, device=device, seed=5),
    )  # fmt: skip
    o = Operation("hyper_in", shape, inputs, lambda op, leaves: op(*leaves, _EPS, 20, _EPS), peers)
    yield o.forward("hyper in forward", Work(moved(*inputs, *o.pushes[:3])))  # the streams are passed on
    yield o.backward("hyper in backward", Work(moved(*inputs, *o.pushes, *inputs)))
    given = (
        normal(tokens, s.width, device=device, seed=6), 2 * exact(tokens, n, seed=7).sigmoid(),
        exact(tokens, n, n, seed=8).softmax(-1), streams,
    )  # fmt: skip
    o = Operation("hyper_expand", shape, given, lambda op, leaves: (op(*leaves),), peers)
    yield o.forward("hyper out forward", Work(moved(*given, *o.pushes)))
    yield o.backward("hyper out backward", Work(moved(*given, *o.pushes, *given)))


def pool_tasks(s: Sizes, lengths: Sequence[int], device: torch.device, peers: Collection[str]) -> Iterator[Task]:
    """Pooling of the three compressors, windows of documents as a model has them."""
    segments, tokens = Segments.from_lengths(lengths, device=device), sum(lengths)
    forms = (("csa", s.ratios[0], s.head), ("hca", s.ratios[1], s.head), ("indexer", s.ratios[0], s.index))
    for name, ratio, width in forms:
        overlap = name != "hca"
        slots = _windows(segments, ratio, overlap)
        rows = tokens * (2 if overlap else 1)
        u, v, ape = (
            normal(n, width, device=device, seed=i, like=torch.float32)
            for i, n in enumerate((rows, rows, slots.shape[1]))
        )
        o = Operation(
            "compress_pool", f"{len(slots)} of {slots.shape[1]} x {width}", (u, v, ape), _pooling(slots), peers,
            calls=LAUNCHES,
        )  # fmt: skip
        yield o.forward(f"pool {name} forward", Work(moved(u, v, ape, slots, *o.pushes)))
        yield o.backward(f"pool {name} backward", Work(moved(u, v, ape, slots, *o.pushes, u, v, ape)))


def _pooling(slots: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    return lambda op, leaves: (op(*leaves, slots)[0],)


def _windows(segments: Segments, ratio: int, overlap: bool) -> Tensor:
    """Rows of every complete group's window, -1 where a document has none. With overlap the group before, of the first
    half of `2 T` rows, and the own group, of the second."""
    document, number, complete = segments.groups(ratio)
    first = torch.tensor([0, *segments.new], device=segments.device).cumsum(0)[document]
    own = (first + number * ratio)[complete, None] + torch.arange(ratio, device=segments.device)
    if not overlap:
        return own
    before = torch.where(number[complete, None] > 0, own - ratio, -1)
    return torch.cat([before, own + segments.tokens], 1)


def swiglu_tasks(s: Sizes, lengths: Sequence[int], device: torch.device, peers: Collection[str]) -> Iterator[Task]:
    """The clamped activation of routed experts, gate and up side by side, times the router's weights; some of its
    inputs lie outside the bounds."""
    rows = sum(lengths) * s.choices
    both = s.limit / 2 * normal(rows, 2 * s.inner, device=device, seed=1)
    weight = normal(rows, device=device, seed=2, like=torch.float32).sigmoid()
    shape = f"{rows} x 2 x {s.inner}"
    o = Operation("swiglu", shape, (both, weight), lambda op, leaves: (op(leaves[0], None, s.limit, leaves[1]),), peers)
    yield o.forward("swiglu forward", Work(moved(both, weight, *o.pushes)))
    yield o.backward("swiglu backward", Work(moved(both, weight, *o.pushes, both, weight)))
