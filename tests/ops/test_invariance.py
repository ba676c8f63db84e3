"""A row's result has the same bits whatever shares the call: other rows, other documents, other cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops import documents, naive
from tests.ops.compare import Draw, island, same_bits
from undertow.ops import OPS, Ops
from undertow.ops.registry import FIXED_ORDER
from undertow.ops.segments import entry_rows, window_rows
from undertow.quant.quantise import quantise
from undertow.quant.scheme import WEIGHTS

OPS_INVARIANT = Ops(batch_invariant=True)
ROWS, EXPERTS = 70, 5
CUTS = st.lists(st.integers(1, ROWS - 1), max_size=8, unique=True).map(sorted)


class RowOp(NamedTuple):
    """An operator as a function of operands that all have one row per token."""

    run: Callable[..., Any]
    operands: list[Tensor]


def _linear(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    weight = draw.normal(37, width, dtype=dtype)
    return RowOp(lambda x: OPS_INVARIANT.linear(x, weight), [draw.normal(ROWS, width, dtype=dtype)])


def _wide_linear(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    weight = draw.normal(37, width, dtype=dtype)
    return RowOp(lambda x: OPS_INVARIANT.wide_linear(x, weight), [draw.normal(ROWS, width, dtype=dtype)])


def _block_linear(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    weight = draw.normal(2, 9, width, dtype=dtype)
    return RowOp(lambda x: OPS_INVARIANT.block_linear(x, weight), [draw.normal(ROWS, 2, width, dtype=dtype)])


def _grouped_linear(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    weight = draw.normal(EXPERTS, 9, width, dtype=dtype)

    def run(x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order = OPS_INVARIANT.dispatch_order(indices, EXPERTS)
        rows = OPS_INVARIANT.grouped_linear(OPS_INVARIANT.permute(x, order), weight, order.counts)
        return OPS_INVARIANT.unpermute(rows * OPS_INVARIANT.permute_weights(weights, order)[:, None], order)

    operands = [draw.normal(ROWS, width, dtype=dtype), draw.normal(ROWS, 2), draw.integers(EXPERTS, ROWS, 2)]
    return RowOp(run, operands)


def _linear_quantised(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    weight = quantise(draw.normal(37, width), WEIGHTS)
    return RowOp(lambda x: OPS_INVARIANT.linear_quantised(x, weight), [draw.normal(ROWS, width, dtype=dtype)])


def _grouped_linear_quantised(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    weight = quantise(draw.normal(EXPERTS, 9, width), WEIGHTS)

    def run(x: Tensor, indices: Tensor) -> Tensor:
        order = OPS_INVARIANT.dispatch_order(indices, EXPERTS)
        rows = OPS_INVARIANT.grouped_linear_quantised(OPS_INVARIANT.permute(x, order), weight, order.counts)
        return OPS_INVARIANT.unpermute(rows, order)

    return RowOp(run, [draw.normal(ROWS, width, dtype=dtype), draw.integers(EXPERTS, ROWS, 2)])


def _linear_cross_entropy(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    weight = draw.normal(100, width, dtype=dtype)
    operands = [draw.normal(ROWS, width, dtype=dtype), draw.integers(100, ROWS)]
    return RowOp(lambda h, labels: OPS_INVARIANT.linear_cross_entropy(h, weight, labels, 1e-3), operands)


def _compress_pool(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    u, v, ape = (draw.normal(n, width) for n in (99, 99, 8))
    slots = draw.integers(100, ROWS, 8) - 1
    return RowOp(lambda s: OPS_INVARIANT.compress_pool(u, v, ape, s)[0], [slots])


def _rms_norm(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    weight = draw.normal(width, dtype=dtype)
    return RowOp(lambda x: OPS_INVARIANT.rms_norm(x, weight, 1e-6), [draw.normal(ROWS, width, dtype=dtype)])


def _rms_norm_of_heads(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    return RowOp(lambda x: OPS_INVARIANT.rms_norm(x, None, 1e-6), [draw.normal(ROWS, 3, width, dtype=dtype)])


def _rotary(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    angles = naive.angles(torch.arange(ROWS), width // 4).to(island(dtype))
    return RowOp(OPS_INVARIANT.rotary, [draw.normal(ROWS, 2, width, dtype=dtype), torch.cos(angles), torch.sin(angles)])


def _head_norm_rotary(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    operands = _rotary(draw, width, dtype).operands
    return RowOp(lambda q, cos, sin: OPS_INVARIANT.head_norm_rotary(q, cos, sin, 1e-6), operands)


def _sinkhorn(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    return RowOp(lambda x: OPS_INVARIANT.sinkhorn(x, 20, 1e-6), [draw.normal(ROWS, 4, 4, scale=width**0.5)])


def _hyper_coefficients(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    scale, base = draw.normal(3), draw.normal(24)
    logits = draw.normal(ROWS, 24, scale=width**0.5)
    return RowOp(lambda x: OPS_INVARIANT.hyper_coefficients(x, scale, base, 20, 1e-6), [logits])


def _hyper_collapse(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    return RowOp(OPS_INVARIANT.hyper_collapse, [draw.normal(ROWS, 4, width, dtype=dtype), draw.normal(ROWS, 4)])


def _hyper_in(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    fn, scale, base, weight = draw.normal(24, 4 * width), draw.normal(3), draw.normal(24), draw.normal(width)
    weight = weight.to(dtype)
    return RowOp(
        lambda x: OPS_INVARIANT.hyper_in(x, fn, scale, base, weight, 1e-6, 20, 1e-6),
        [draw.normal(ROWS, 4, width, dtype=dtype)],
    )


def _hyper_head(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    fn, scale, base, weight = draw.normal(4, 4 * width), draw.normal(1), draw.normal(4), draw.normal(width)
    weight = weight.to(dtype)
    return RowOp(
        lambda x: OPS_INVARIANT.hyper_head(x, fn, scale, base, weight, 1e-6, 1e-6),
        [draw.normal(ROWS, 4, width, dtype=dtype)],
    )


def _hyper_expand(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    y, streams = draw.normal(ROWS, width, dtype=dtype), draw.normal(ROWS, 4, width, dtype=dtype)
    return RowOp(OPS_INVARIANT.hyper_expand, [y, draw.normal(ROWS, 4), draw.normal(ROWS, 4, 4), streams])


def _route(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    bias = draw.normal(width)
    return RowOp(lambda x: OPS_INVARIANT.route(x, bias, 6, 1.5), [draw.normal(ROWS, width, scale=5.0)])


def _swiglu(draw: Draw, width: int, dtype: torch.dtype) -> RowOp:
    gate, up = (draw.normal(ROWS, width, dtype=dtype, scale=8.0) for _ in range(2))
    return RowOp(lambda g, u, w: OPS_INVARIANT.swiglu(g, u, 10.0, w), [gate, up, draw.normal(ROWS)])


ROW_OPS: dict[str, Callable[[Draw, int, torch.dtype], RowOp]] = {
    "linear": _linear,
    "wide_linear": _wide_linear,
    "block_linear": _block_linear,
    "grouped_linear, permute, permute_weights, unpermute, dispatch_order": _grouped_linear,
    "linear_quantised": _linear_quantised,
    "grouped_linear_quantised": _grouped_linear_quantised,
    "linear_cross_entropy": _linear_cross_entropy,
    "compress_pool": _compress_pool,
    "rms_norm": _rms_norm,
    "rms_norm of heads": _rms_norm_of_heads,
    "rotary": _rotary,
    "head_norm_rotary": _head_norm_rotary,
    "sinkhorn": _sinkhorn,
    "hyper_coefficients": _hyper_coefficients,
    "hyper_collapse": _hyper_collapse,
    "hyper_in": _hyper_in,
    "hyper_expand": _hyper_expand,
    "hyper_head": _hyper_head,
    "route": _route,
    "swiglu": _swiglu,
}


def pieces(x: Tensor, cuts: Sequence[int]) -> list[Tensor]:
    return list(x.tensor_split(list(cuts)))


def joined(parts: Sequence[Any]) -> tuple[Tensor, ...]:
    split = [p if isinstance(p, tuple) else (p,) for p in parts]
    return tuple(torch.cat(column) for column in zip(*split, strict=True))


def test_every_operator_is_covered():
    covered = {name for names in ROW_OPS for name in names.replace(" of heads", "").split(", ")}
    elsewhere = {"indexer_scores", "indexer_select", "sparse_attention", "indexer_distillation", "indexer_recall"}
    elsewhere.add("csa_attention")  # the same function as sparse attention
    elsewhere.add("linear_cross_entropy_mean")  # of the losses of rows
    assert covered | elsewhere == set(OPS)
    assert covered >= FIXED_ORDER - elsewhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 24, 30, 100, 512])
@pytest.mark.parametrize("name", ROW_OPS)
@settings(max_examples=6)
@given(cuts=CUTS)
def test_rows_in_any_split(name, width, dtype, cuts):
    run, operands = ROW_OPS[name](Draw(name, width), width, dtype)
    whole = run(*operands)
    for cut in (cuts, range(1, ROWS, 1 if len(cuts) == 1 else 7)):
        parts = zip(*(pieces(x, cut) for x in operands), strict=True)
        assert same_bits(joined([run(*part) for part in parts]), whole)


@pytest.mark.parametrize("name", ROW_OPS)
def test_rows_in_another_order(name):
    run, operands = ROW_OPS[name](Draw(name, "order"), 30, torch.float32)
    order = Draw("order").order(ROWS)
    whole = run(*operands)
    whole = whole if isinstance(whole, tuple) else (whole,)
    assert same_bits(joined([run(*(x[order] for x in operands))]), tuple(w[order] for w in whole))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["linear_cross_entropy", "rms_norm"])
def test_long_rows_are_not_cut_among_threads(name, threads):
    """Rows as long as a vocabulary: torch splits the sum of a lone one."""
    torch.set_num_threads(threads)
    draw = Draw("long")
    if name == "rms_norm":
        operands, run = [draw.normal(24, 40000)], lambda x: OPS_INVARIANT.rms_norm(x, None, 1e-6)
    else:
        weight, labels = draw.normal(70000, 8), draw.integers(70000, 24)
        operands, run = [draw.normal(24, 8), labels], lambda h, y: OPS_INVARIANT.linear_cross_entropy(h, weight, y)[0]
    whole = run(*operands)
    parts = zip(*(pieces(x, range(1, 24)) for x in operands), strict=True)
    assert same_bits(joined([run(*part) for part in parts]), (whole,))


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["rms_norm", "hyper_collapse", "hyper_expand", "route", "swiglu", "rotary"])
def test_threads_may_start_inside_a_row(name, threads):
    """Enough elements that torch hands parts of rows to several threads."""
    run, operands = ROW_OPS[name](Draw(name, threads), 1003, torch.float32)
    torch.set_num_threads(1)
    want = joined([run(*operands)])
    torch.set_num_threads(threads)
    assert same_bits(joined([run(*operands)]), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["linear", "block_linear", "linear_cross_entropy"])
def test_products_with_several_threads(name, dtype):
    """The bits of a product may depend on the number of threads, those of a row still not on its neighbours."""
    torch.set_num_threads(2)
    run, operands = ROW_OPS[name](Draw(name, "threads"), 1003, dtype)
    whole = run(*operands)
    for size in (1, 7, 33):
        parts = zip(*(x.split(size) for x in operands), strict=True)
        assert same_bits(joined([run(*part) for part in parts]), whole)


WINDOW, RATIO, HEADS, WIDTH = 9, 4, 3, 24


class Model(NamedTuple):
    """Operands of attention and indexer for all tokens of all documents."""

    q: Tensor
    latents: list[Tensor]
    entries: list[Tensor]
    weights: Tensor
    sink: Tensor

    @classmethod
    def draw(cls, lengths: Sequence[int], dtype: torch.dtype) -> Model:
        draw = Draw("model", tuple(lengths))
        return cls(
            draw.normal(sum(lengths), HEADS, WIDTH, dtype=dtype),
            [draw.normal(n, WIDTH, dtype=dtype) for n in lengths],
            [draw.normal(n // RATIO, WIDTH, dtype=dtype) for n in lengths],
            draw.normal(sum(lengths), HEADS, dtype=dtype, scale=0.1),
            draw.normal(HEADS),
        )

    def run(self, kind: str, segments: documents.Segments, flat: Sequence[int]) -> tuple[Tensor, ...]:
        """One call's output and log-sum-exp, and for CSA its selection and scores."""
        ends = [p + n for p, n in zip(segments.past, segments.new, strict=True)]
        rows = list(flat)
        window = documents.rows([x[:n] for x, n in zip(self.latents, ends, strict=True)], window_rows(WINDOW), segments)
        entries = selected = None
        extra: tuple[Tensor, ...] = ()
        if kind != "swa":
            made = [x[: n // RATIO] for x, n in zip(self.entries, ends, strict=True)]
            entries = documents.rows(made, entry_rows(RATIO), segments)
            if kind == "csa":
                arguments = self.q[rows], entries, self.weights[rows]
                selected = OPS_INVARIANT.indexer_select(*arguments, 3, segments, RATIO)
                scores = OPS_INVARIANT.indexer_scores(*arguments, segments, RATIO)
                extra = selected, torch.nn.functional.pad(scores, (0, 99 - scores.shape[1]), value=-torch.inf)
        outputs = OPS_INVARIANT.sparse_attention(
            self.q[rows], window, entries, selected, self.sink, segments,
            window_size=WINDOW, ratio=RATIO if kind != "swa" else 0, scale=WIDTH**-0.5,
        )  # fmt: skip
        return *outputs, *extra


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@settings(max_examples=15)
@given(schedule=documents.schedules(largest=90))
def test_documents_in_any_pieces(kind, dtype, schedule):
    model = Model.draw(schedule.lengths, dtype)
    whole = model.run(kind, schedule.whole, range(schedule.whole.tokens))
    for segments, flat in schedule.calls():
        part = model.run(kind, segments, flat)
        assert same_bits(part, tuple(w[flat] for w in whole))


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_token_by_token(kind):
    """Decoding: 300 tokens (more than one chunk of entries) one at a time next to another document."""
    schedule = documents.Schedule(((1,) * 300, (17, *(0, 1) * 20)))
    model = Model.draw(schedule.lengths, torch.float32)
    whole = model.run(kind, schedule.whole, range(schedule.whole.tokens))
    for index, (segments, flat) in enumerate(schedule.calls()):
        if index % 9 == 0 or index > 290:
            assert same_bits(model.run(kind, segments, flat), tuple(w[flat] for w in whole))
