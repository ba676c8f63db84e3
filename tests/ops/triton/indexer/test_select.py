"""Scores and choice of the indexer's kernels against the reference: packed documents, any length, ties, NaN."""

from itertools import pairwise

import pytest
import torch

from tests.ops.compare import Draw, gradients, relative
from undertow.ops.reference import indexer as reference
from undertow.ops.segments import Rows, Segments, entry_rows
from undertow.ops.triton.attention.geometry import sight
from undertow.ops.triton.indexer import runs as planning
from undertow.ops.triton.indexer import select
from undertow.ops.triton.indexer.runs import Run, equal_runs, runs, together
from undertow.ops.triton.indexer.scoring import scores_of
from undertow.ops.triton.indexer.select import indexer_scores, indexer_select, indexer_select_fp8, refusal

RATIO, HEADS, WIDTH = 4, 16, 32
CASES = [[30], [3], [5, 0, 3, 41, 1]]


def operands(new: list[int], device: str, dtype: torch.dtype = torch.bfloat16, heads: int = HEADS, width: int = WIDTH):
    draw = Draw(tuple(new), heads)
    segments = Segments.from_lengths(new, device=device)
    keys = draw.normal(sum(n // RATIO for n in new), width, dtype=dtype).to(device)
    q = draw.normal(sum(new), heads, width, dtype=dtype).to(device)
    weights = draw.normal(sum(new), heads, scale=(heads * width) ** -0.5).to(device)
    return q, Rows(keys, segments.layout(entry_rows(RATIO))), weights, segments


def ascending(picks: torch.Tensor) -> list[list[int]]:
    return [sorted(n for n in row if n >= 0) + [-1] * row.count(-1) for row in picks.tolist()]


@pytest.mark.parametrize("new", CASES, ids=str)
def test_scores(new, device):
    q, keys, weights, segments = operands(new, device)
    want = reference.indexer_scores(q, keys, weights, segments, RATIO)
    got = indexer_scores(q, keys, weights, segments, RATIO)
    assert got.dtype == torch.float32 and torch.equal(got.isneginf(), want.isneginf())
    seen = ~want.isneginf()
    assert relative(got[seen], want[seen]) < 1e-6


@pytest.mark.parametrize(("heads", "width"), [(64, 128), (32, 16)])
def test_scores_of_other_heads_and_weights(heads, width, device):
    q, keys, weights, segments = operands([9, 4], device, heads=heads, width=width)
    weights = weights.bfloat16()
    want = reference.indexer_scores(q, keys, weights, segments, RATIO)
    seen = ~want.isneginf()
    assert relative(indexer_scores(q, keys, weights, segments, RATIO)[seen], want[seen]) < 1e-6


def test_gradients_of_scores(device):
    q, keys, weights, segments = operands([21, 6], device)
    leaves = [q.requires_grad_(), keys.data.requires_grad_(), weights.requires_grad_()]
    scores = indexer_scores(q, keys, weights, segments, RATIO)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = reference.indexer_scores(exact[0], Rows(exact[1], keys.layout), exact[2], segments, RATIO)
    seen = ~wanted.isneginf()
    upstream = Draw("upstream").normal(int(seen.sum())).to(device)
    for got, want in zip(
        gradients(scores[seen], leaves, [upstream]), gradients(wanted[seen], exact, [upstream.double()]), strict=True
    ):
        assert relative(got, want) < 3e-3


@pytest.mark.parametrize("k", [3, 20])
@pytest.mark.parametrize("new", CASES, ids=str)
def test_choice(new, k, device):
    q, keys, weights, segments = operands(new, device)
    got = indexer_select(q, keys, weights, k, segments, RATIO)
    assert got.dtype == torch.int64
    assert got.tolist() == ascending(reference.indexer_select(q, keys, weights, k, segments, RATIO))


def test_ties_and_nan(device):
    """Whole numbers are exact: equal keys tie, a NaN is above all, and so is what the reference keeps."""
    q, keys, weights, segments = operands([32], device)
    q.copy_((q * 2).round()), keys.data.copy_(keys.data.round())
    keys.data[3:7] = keys.data[0]
    weights = (weights * 50).round()
    want = reference.indexer_select(q, keys, weights, 5, segments, RATIO)
    assert indexer_select(q, keys, weights, 5, segments, RATIO).tolist() == ascending(want)
    keys.data[5, 0] = float("nan")
    weights[27:, 3] = torch.inf
    want = reference.indexer_select(q, keys, weights, 3, segments, RATIO)
    assert indexer_select(q, keys, weights, 3, segments, RATIO).tolist() == ascending(want)


def test_runs_change_nothing(device, monkeypatch):
    q, keys, weights, segments = operands([70], device)
    whole = indexer_select(q, keys, weights, 5, segments, RATIO)
    monkeypatch.setattr(select, "runs", lambda s, ratio: runs(s, ratio, 64 * 16))
    assert len(runs(segments, RATIO, 64 * 16)) == 2
    assert torch.equal(indexer_select(q, keys, weights, 5, segments, RATIO), whole)


def test_only_what_is_visible_is_written(device):
    q, keys, weights, segments = operands([13, 25], device)
    run, view = Run(5, 38, 12), sight(segments, RATIO)
    out = torch.full((33, 12), torch.nan, device=device)
    scores_of(q, keys.data, weights, segments, RATIO, run, out)
    visible = (view.high - view.low)[5:, None] > torch.arange(12, device=device)
    assert torch.equal(out.isnan(), ~visible)


def test_e4m3(device):
    """Codes that bfloat16 holds as well, under scales that are powers of two: the same choice."""
    q, keys, weights, segments = operands([22, 7], device)
    q, rows = (x.float().to(torch.float8_e4m3fn) for x in (q, keys.data))
    draw = Draw("scales")
    q_scales = torch.exp2(draw.integers(5, *weights.shape).float() - 2).to(device)
    key_scales = torch.exp2(draw.integers(5, len(rows)).float() - 2).to(device)
    got = indexer_select_fp8(q, q_scales, rows, key_scales, weights, 4, segments, RATIO)
    wide = Rows((rows.float() * key_scales[:, None]), keys.layout)
    want = reference.indexer_select(q.float() * q_scales[..., None], wide, weights, 4, segments, RATIO)
    assert got.tolist() == ascending(want)


def test_nothing(device):
    for new in ([], [0, 0], [2, 3]):
        q, keys, weights, segments = operands(new, device)
        assert (indexer_select(q, keys, weights, 3, segments, RATIO) == -1).all()
        assert indexer_scores(q, keys, weights, segments, RATIO).shape == (sum(new), 0)


@pytest.mark.parametrize("lengths", [[1 << 20], [128] * 8192, [1]], ids=["one", "many", "short"])
def test_runs_fit_a_grid(lengths):
    """Tokens of a run lie along a second axis, which ends at 65,535."""
    segments = Segments.from_lengths(lengths)
    for planned in (runs(segments, RATIO), equal_runs(segments.tokens, 128, 1 << 24), equal_runs(9, 0, 9)):
        assert max(run.tokens for run in planned) <= 1 << 15
        assert planned[0].start == 0 and all(a.stop == b.start for a, b in pairwise(planned))
    assert equal_runs(9, 0, 9) == (Run(0, 9, 0),) and len(equal_runs(1 << 20, 128, 1 << 24)) == 32


def test_scores_of_several_runs(device, monkeypatch):
    q, keys, weights, segments = operands([70, 9], device)
    whole = indexer_scores(q, keys, weights, segments, RATIO)
    monkeypatch.setattr(planning, "_MOST", 32)
    assert torch.equal(indexer_scores(q, keys, weights, segments, RATIO), whole)


def test_rows_at_any_address(device):
    q, keys, weights, segments = operands([30], device)
    want = indexer_scores(q, keys, weights, segments, RATIO)
    q, data = (torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in (q, keys.data))
    assert q.data_ptr() % 16 and data.data_ptr() % 16
    assert torch.equal(indexer_scores(q, Rows(data, keys.layout), weights, segments, RATIO), want)


def test_plan():
    segments = Segments.from_lengths([1000, 3, 40, 500])
    planned = runs(segments, RATIO, 64 * 128)
    assert [planned[0].start, planned[-1].stop] == [0, 1543]
    assert all(a.stop == b.start for a, b in pairwise(planned))
    low, high = sight(segments, RATIO).seen
    for run in planned:
        assert run.width >= (high - low)[run.start : run.stop].max() and run.width % 16 == 0
        assert run.tokens * run.width <= 64 * 128 or run.tokens <= 64
        for block in (1, 16):
            spans = [int(high[min(t + block, run.stop) - 1] - low[t]) for t in range(run.start, run.stop, block)]
            assert together(segments, RATIO, run, block) == max(spans)
    assert planning.SCORES * 4 == 128 << 20


def test_refusal():
    q, keys, weights, segments = operands([8], "cpu")
    assert refusal(q, keys, weights, segments) is None
    assert "past" in (refusal(q, keys, weights, Segments.from_lengths([8], [4])) or "")
    assert "batch_invariant" in (refusal(q, keys, weights, segments, invariant=True) or "")
    assert "queries are float32" in (refusal(q.float(), keys, weights, segments) or "")
    assert "float64" in (refusal(q, keys, weights.double(), segments) or "")
    assert "12 index heads" in (refusal(q[:, :12], keys, weights[:, :12], segments) or "")
    assert "24 numbers" in (refusal(q[..., :24], keys, weights, segments) or "")
