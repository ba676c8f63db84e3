"""Sparse attention of the three layer types, forward and backward, at the widths of the released models."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from undertow.bench import attention_peers
from undertow.bench.backends import limit_of, own
from undertow.bench.task import Run, Task, Way, norm, relative
from undertow.bench.work import BACKWARD, Work, entry_pairs, slots, window_pairs
from undertow.ops.registry import BACKENDS, REFERENCE
from undertow.ops.segments import Rows, Segments, entry_rows, window_rows

# The registry has the layers whose indexer chooses entries apart.
_PLAIN, _CHOOSING = "sparse_attention", "csa_attention"
_LSE = 1e-3  # nats that a log-sum-exp may be off


@dataclass(frozen=True)
class Form:
    """Sizes of one layer type: `keep` entries a query (None: all visible ones) of one in `ratio` tokens (0: none)."""

    heads: int = 64
    width: int = 512
    window: int = 128
    ratio: int = 0
    keep: int | None = None


FORMS = {
    "swa": Form(),
    "hca": Form(ratio=128),
    "csa": Form(ratio=4, keep=512),
    "pro-csa": Form(heads=128, ratio=4, keep=1024),
}
_TINY = Form(heads=4, width=32, window=16)
TINY = {
    "swa": _TINY,
    "hca": replace(_TINY, ratio=16),
    "csa": replace(_TINY, ratio=4, keep=8),
    "pro-csa": replace(_TINY, heads=8, ratio=4, keep=16),
}
"""The same for a CPU."""


class Problem:
    """Seeded inputs in bfloat16 of one form over documents of the given lengths, and what they must give."""

    def __init__(self, form: Form, lengths: Sequence[int], device: torch.device) -> None:
        self.form, self.lengths, self.device = form, tuple(lengths), device
        self.segments = Segments.from_lengths(lengths, device=device)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device)

        tokens, entries = sum(lengths), sum(n // form.ratio for n in lengths) if form.ratio else 0
        self.q, self.do = (normal(tokens, form.heads, form.width).bfloat16() for _ in range(2))
        self.window = normal(tokens, form.width).bfloat16()
        self.entries = normal(entries, form.width).bfloat16() if form.ratio else None
        self.sink = normal(form.heads) * 0.5
        self.scale = form.width**-0.5
        self.selected = None if form.keep is None else self._selection(form.keep, generator)

    def _selection(self, keep: int, generator: torch.Generator) -> Tensor:
        """Visible entries drawn at random, `[T, keep]`, ascending as the indexer gives them, then -1 where fewer than
        `keep` are visible."""
        chosen = torch.full((self.segments.tokens, keep), -1, dtype=torch.int64, device=self.device)
        visible = (self.segments.positions + 1) // self.form.ratio
        for start in range(0, self.segments.tokens, 4096):
            seen = visible[start : start + 4096, None]
            columns = max(max(self.lengths) // self.form.ratio, 1)
            draw = torch.rand(len(seen), columns, generator=generator, device=self.device)
            draw.masked_fill_(torch.arange(columns, device=self.device) >= seen, -1.0)
            value, entry = draw.topk(min(keep, columns))
            order = entry.masked_fill_(value < 0, columns).sort(1)[0]
            chosen[start : start + 4096, : entry.shape[1]] = order.masked_fill_(order == columns, -1)
        return chosen

    @property
    def leaves(self) -> list[Tensor]:
        """What has gradients: q, window, entries where there are any, sink."""
        return [x for x in (self.q, self.window, self.entries, self.sink) if x is not None]

    def call(self, attention: Callable[..., Any], leaves: Sequence[Tensor]) -> Any:
        """`attention` with the reference's signature, on `leaves` in the order of `self.leaves`."""
        form, segments = self.form, self.segments
        q, window, *entries, sink = leaves
        kept = Rows(entries[0], segments.layout(entry_rows(form.ratio))) if entries else None
        return attention(
            q, Rows(window, segments.layout(window_rows(form.window))), kept, self.selected, sink, segments,
            window_size=form.window, ratio=form.ratio, scale=self.scale,
        )  # fmt: skip

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Output, log-sum-exp, and gradients of the leaves, by the reference in float32."""
        leaves = [x.detach().float().requires_grad_() for x in self.leaves]
        o, lse = self.call(REFERENCE[_PLAIN], leaves)
        return o.detach(), lse, list(torch.autograd.grad(o, leaves, self.do.float()))

    def work(self) -> tuple[Work, Work]:
        """Of the forward and the backward pass."""
        form, each = self.form, 4 * self.form.heads * self.form.width
        pairs = window_pairs(self.lengths, form.window)
        if form.ratio:
            pairs += entry_pairs(self.lengths, form.ratio, form.keep)
        nominal = slots(self.lengths, form.window, form.ratio, form.keep)
        inputs = sum(x.nbytes for x in self.leaves) + (0 if self.selected is None else self.selected.nbytes)
        output = self.q.nbytes + 4 * form.heads * len(self.q)
        gradients = sum(x.nbytes for x in self.leaves)
        backward = inputs + output + self.do.nbytes + gradients
        return (
            Work(inputs + output, each * pairs, each * nominal),
            Work(backward, BACKWARD * each * pairs, BACKWARD * each * nominal),
        )


def attention_tasks(
    name: str, form: Form, lengths: Sequence[int], device: torch.device, peers: Collection[str]
) -> Iterator[Task]:
    """Forward and backward of `form` under `name`, by every backend and by the named peers."""
    problem = Problem(form, lengths, device)
    shape = f"{'+'.join(map(str, lengths))} tokens, {form.heads} x {form.width}"
    forward, backward = problem.work()
    calls = _calls(problem, peers)

    def of_output(found: Any) -> float:
        o, lse = found if isinstance(found, tuple) else (found, problem.expected[1])  # a peer gives the output alone
        close = bool(((lse - problem.expected[1]).abs() <= _LSE).all())
        return relative(o, problem.expected[0]) if close else math.inf

    def of_gradients(found: Sequence[Tensor]) -> float:
        least = 1e-3 * norm(problem.do)
        return max(relative(x, y, least) for x, y in zip(found, problem.expected[2], strict=True))

    ways = {key: Way(_forward(problem, call), limit) for key, (call, limit) in calls.items()}
    yield Task(f"{name} forward", shape, forward, of_output, ways)
    ways = {key: Way(_backward(problem, call), limit) for key, (call, limit) in calls.items()}
    yield Task(f"{name} backward", shape, backward, of_gradients, ways)


_Call = Callable[[], Callable[[Sequence[Tensor]], Any]]


def _calls(problem: Problem, peers: Collection[str]) -> dict[str, tuple[_Call, float]]:
    """For every way what makes its function from leaves to output, and the error that it may have."""

    def backend(name: str) -> _Call:
        def make() -> Callable[[Sequence[Tensor]], Any]:
            attention = own(_PLAIN if problem.form.keep is None else _CHOOSING, name, problem.device)
            return lambda leaves: problem.call(attention, leaves)

        return make

    calls: dict[str, tuple[_Call, float]] = {
        name: (backend(name), limit_of(name)) for name in BACKENDS if name != "reference" or name in peers
    }
    others = {"compile": attention_peers.compiled, "flex": attention_peers.flex, "tilelang": attention_peers.tilelang}
    return calls | {name: (make(problem), attention_peers.LIMIT) for name, make in others.items() if name in peers}


def _forward(problem: Problem, call: _Call) -> Callable[[], Run]:
    def build() -> Run:
        function = call()

        def run() -> Any:
            with torch.no_grad():
                return function(problem.leaves)

        return run

    return build


def _backward(problem: Problem, call: _Call) -> Callable[[], Run]:
    def build() -> Run:
        leaves = [x.detach().requires_grad_() for x in problem.leaves]
        found = call()(leaves)
        o = found[0] if isinstance(found, tuple) else found
        return lambda: torch.autograd.grad(o, leaves, problem.do, retain_graph=True)

    return build
