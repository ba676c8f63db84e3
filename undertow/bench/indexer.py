"""The lightning indexer: its scores, the choice of the best, both in one, and its distillation loss."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from undertow.bench.attention import FORMS as ATTENTION
from undertow.bench.attention import TINY as TINY_ATTENTION
from undertow.bench.attention import Form, Problem
from undertow.bench.backends import own, ways_of
from undertow.bench.task import OWN, Absent, Run, Task, Way, relative
from undertow.bench.work import Work, entry_pairs, slots
from undertow.ops.registry import REFERENCE
from undertow.ops.segments import Rows, Segments, entry_rows

_FP8 = 5e-2  # relative error of scores from E4M3 queries and keys


@dataclass(frozen=True)
class Sizes:
    """Index heads and their width, and the attention whose entries are chosen."""

    heads: int
    width: int
    attention: Form


FLASH = Sizes(64, 128, ATTENTION["csa"])
TINY = Sizes(4, 16, TINY_ATTENTION["csa"])
"""The same for a CPU."""


class Indexer:
    """Seeded bfloat16 inputs of one layer's indexer over documents of the given lengths."""

    def __init__(self, sizes: Sizes, lengths: Sequence[int], device: torch.device) -> None:
        self.sizes, self.lengths, self.device = sizes, tuple(lengths), device
        self.ratio, self.keep = sizes.attention.ratio, sizes.attention.keep or 0
        self.segments = Segments.from_lengths(lengths, device=device)
        generator = torch.Generator(device).manual_seed(1)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device)

        tokens, entries = sum(lengths), sum(n // self.ratio for n in lengths)
        self.q = normal(tokens, sizes.heads, sizes.width).bfloat16()
        self.keys = normal(entries, sizes.width).bfloat16()
        self.weights = normal(tokens, sizes.heads) * (sizes.heads * sizes.width) ** -0.5

    def rows(self, keys: Tensor) -> Rows:
        """`keys [N, c]` with the layout of entries."""
        return Rows(keys, self.segments.layout(entry_rows(self.ratio)))

    @cached_property
    def scores(self) -> Tensor:
        """By the reference in float32, `[T, N]`."""
        keys = self.rows(self.keys.float())
        return REFERENCE["indexer_scores"](self.q.float(), keys, self.weights, self.segments, self.ratio)

    @property
    def scoring(self) -> tuple[float, float]:
        """Operations of scoring, of visible pairs and of all."""
        each = 2.0 * self.sizes.heads * self.sizes.width
        return each * entry_pairs(self.lengths, self.ratio), each * self.scores.numel()

    @property
    def input_bytes(self) -> int:
        """Queries, keys and weights."""
        return self.q.nbytes + self.keys.nbytes + self.weights.nbytes

    def of_scores(self, found: Tensor) -> float:
        """Error of scores; what is not visible does not count."""
        seen = ~torch.isneginf(self.scores)
        if found.shape != self.scores.shape:
            return math.inf
        return relative(found.float().masked_fill(~seen, 0.0), self.scores.masked_fill(~seen, 0.0))

    def of_choice(self, chosen: Tensor) -> float:
        """By how much the scores of the chosen entries fall short of the best ones, infinite for a choice that is too
        small, repeats itself or is not visible. Order does not matter."""
        best = self.scores.topk(min(self.keep, self.scores.shape[1])).values
        best = best.masked_fill(torch.isneginf(best), 0.0)
        seen = (self.segments.positions + 1) // self.ratio
        picked = chosen.long().sort(-1).values
        wrong = (picked >= seen[:, None]).any() | ((picked[:, 1:] == picked[:, :-1]) & (picked[:, 1:] >= 0)).any()
        if bool(wrong | ((picked >= 0).sum(-1) != seen.clamp(max=self.keep)).any()):
            return math.inf
        if not self.scores.shape[1]:  # every document is shorter than one entry
            return 0.0
        value = self.scores.gather(1, picked.clamp(min=0)).masked_fill(picked < 0, 0.0)
        return relative(value.sum(-1), best.sum(-1))


def indexer_tasks(sizes: Sizes, lengths: Sequence[int], device: torch.device, peers: Collection[str]) -> Iterator[Task]:
    """Scoring, choosing, and both in one."""
    p = Indexer(sizes, lengths, device)
    exact, nominal = p.scoring
    shape = f"{'+'.join(map(str, lengths))} tokens, {sizes.heads} x {sizes.width}"
    kept = 8 * len(p.q) * p.keep

    def scoring(scores: Callable[..., Tensor]) -> Run:
        return lambda: scores(p.q, p.rows(p.keys), p.weights, p.segments, p.ratio)

    ways = ways_of("indexer_scores", device, peers, scoring)
    others = {"compile": Way(_compiled(p)), "deep-gemm": Way(_deep_gemm(p), _FP8)}
    ways |= {name: way for name, way in others.items() if name in peers}
    yield Task("scoring", shape, Work(p.input_bytes + p.scores.nbytes, exact, nominal), p.of_scores, ways)

    topped = f"{'+'.join(map(str, lengths))} tokens, {p.keep} of {p.scores.shape[1]}"
    ways = {"triton": Way(_triton_top_k(p), OWN)}
    if "torch.topk" in peers:
        ways["torch.topk"] = Way(lambda: lambda: p.scores.topk(min(p.keep, p.scores.shape[1]), sorted=False))
    # Of a row only what is visible must be read, and the two bounds of that.
    read = 4 * entry_pairs(lengths, p.ratio) + 8 * len(p.q)
    yield Task("top-k", topped, Work(read + kept), lambda found: p.of_choice(_numbers(found)), ways)

    def selecting(select: Callable[..., Tensor]) -> Run:
        return lambda: select(p.q, p.rows(p.keys), p.weights, p.keep, p.segments, p.ratio)

    ways = ways_of("indexer_select", device, peers, selecting)
    yield Task("scoring and top-k", shape, Work(p.input_bytes + kept, exact, nominal), p.of_choice, ways)


def _numbers(found: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """What is chosen; of torch's scores and numbers, which may be of hidden entries, -1 for those. It is not timed."""
    return found if isinstance(found, Tensor) else found[1].masked_fill(torch.isneginf(found[0]), -1)


def _triton_top_k(p: Indexer) -> Callable[[], Run]:
    def build() -> Run:
        own("indexer_select", "triton", p.device)
        top_k = importlib.import_module("undertow.ops.triton.indexer.top_k")
        scores, out = p.scores.contiguous(), torch.empty(len(p.q), p.keep, dtype=torch.int64, device=p.device)
        high = ((p.segments.positions + 1) // p.ratio).int()
        low = torch.zeros_like(high)

        def run() -> Tensor:
            top_k.choose_best(scores, low, high, 0, out)
            return out

        return run

    return build


def _compiled(p: Indexer) -> Callable[[], Run]:
    def build() -> Run:
        if len(p.lengths) > 1:
            raise Absent("written for one document")
        hidden = torch.isneginf(p.scores)

        def scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
            dots = (q.flatten(0, 1) @ keys.T).view(*q.shape[:2], -1).relu()
            return (dots.float() * weights[..., None]).sum(1).masked_fill(hidden, -torch.inf)

        function = torch.compile(scores, dynamic=False)
        return lambda: function(p.q, p.keys, p.weights)

    return build


def _deep_gemm(p: Indexer) -> Callable[[], Run]:
    def build() -> Run:
        if importlib.util.find_spec("deep_gemm") is None:
            raise Absent("deep_gemm is not installed")
        if p.device.type == "cpu" or len(p.lengths) > 1:
            raise Absent("taken for one document on a GPU")
        deep_gemm: Any = importlib.import_module("deep_gemm")
        q = p.q.to(torch.float8_e4m3fn)
        scale = p.keys.float().abs().amax(-1).clamp(min=1e-4) / 448.0
        keys = (p.keys.float() / scale[:, None]).to(torch.float8_e4m3fn)
        stop = ((p.segments.positions + 1) // p.ratio).int()
        start = torch.zeros_like(stop)

        def run() -> Tensor:
            scores = deep_gemm.fp8_mqa_logits(q, (keys, scale), p.weights, start, stop, clean_logits=False)
            return scores[:, : len(p.keys)]  # rows may be padded

        return run

    return build


def distillation_tasks(
    sizes: Sizes, lengths: Sequence[int], device: torch.device, peers: Collection[str]
) -> Iterator[Task]:
    """The loss on the selected entries, forward and backward."""
    index, attention = Indexer(sizes, lengths, device), Problem(sizes.attention, lengths, device)
    with torch.no_grad():
        lse = attention.call(REFERENCE["sparse_attention"], attention.leaves)[1]
    entries = attention.entries
    assert entries is not None

    def call(function: Callable[..., Tensor], leaves: Sequence[Tensor], wide: bool = False) -> Tensor:
        q, keys, weights = leaves
        taught = (attention.q.float(), entries.float()) if wide else (attention.q, entries)
        return function(
            q, index.rows(keys), weights, taught[0], index.rows(taught[1]), lse, attention.selected, index.segments,
            ratio=index.ratio, scale=attention.scale,
        )  # fmt: skip

    def leaves() -> list[Tensor]:
        return [x.detach().requires_grad_() for x in (index.q, index.keys, index.weights)]

    plain = REFERENCE["indexer_distillation"]
    exact_leaves = [x.detach().float().requires_grad_() for x in leaves()]
    loss = call(plain, exact_leaves, wide=True)
    push = torch.full_like(loss, 1.0 / len(loss))
    gradients = torch.autograd.grad(loss, exact_leaves, push)
    least = 1e-3 * float(push.norm())

    def forward(function: Callable[..., Tensor]) -> Run:
        held = [x.detach() for x in leaves()]
        return lambda: call(function, held)

    def backward(function: Callable[..., Tensor]) -> Run:
        held = leaves()
        found = call(function, held)
        return lambda: torch.autograd.grad(found, held, push, retain_graph=True)

    def of_gradients(found: Sequence[Tensor]) -> float:
        return max(relative(x, y, least) for x, y in zip(found, gradients, strict=True))

    shape = f"{'+'.join(map(str, lengths))} tokens, {sizes.heads} x {sizes.width}"
    pairs, nominal = entry_pairs(lengths, index.ratio, index.keep), slots(lengths, 0, index.ratio, index.keep)
    taught, taken = 2 * attention.form.heads * attention.form.width, 2 * sizes.heads * sizes.width
    read = index.input_bytes + attention.q.nbytes + entries.nbytes + lse.nbytes
    read += 0 if attention.selected is None else attention.selected.nbytes
    work = Work(read + loss.nbytes, pairs * (taught + taken), nominal * (taught + taken))
    ways = ways_of("indexer_distillation", device, peers, forward)
    # Of queries that see one entry the loss is 0, and all that is found is rounding: no less than 1e-3 nats each.
    floor = 1e-3 * len(loss) ** 0.5
    yield Task("distillation forward", shape, work, lambda found: relative(found, loss.detach(), floor), ways)
    # Attention's logits have no gradient; the indexer's have two products more.
    each = taught + 3 * taken
    again = Work(read + loss.nbytes + index.input_bytes, pairs * each, nominal * each)
    ways = ways_of("indexer_distillation", device, peers, backward)
    yield Task("distillation backward", shape, again, of_gradients, ways)
