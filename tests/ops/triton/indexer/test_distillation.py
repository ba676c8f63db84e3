"""The distillation's kernels against the reference: both stages, packed documents, runs of tokens, empty targets."""

import pytest
import torch

from tests.ops.compare import Draw, relative
from undertow.ops.reference.distillation import indexer_distillation as reference
from undertow.ops.segments import Rows, Segments, entry_rows
from undertow.ops.triton.indexer import distillation, gathered
from undertow.ops.triton.indexer.distillation import indexer_distillation, refusal
from undertow.ops.triton.indexer.runs import runs

RATIO, HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH = 4, 8, 64, 16, 32
SCALE = WIDTH**-0.5


def lesson(new: list[int], device: str, selected: bool):
    draw, tokens, entries = Draw(tuple(new), selected), sum(new), sum(n // RATIO for n in new)
    segments = Segments.from_lengths(new, device=device)

    def drawn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return draw.normal(*shape, scale=scale, dtype=dtype).to(device)

    leaves = [
        drawn(tokens, INDEX_HEADS, INDEX_WIDTH),
        drawn(entries, INDEX_WIDTH),
        drawn(tokens, INDEX_HEADS, scale=0.1, dtype=torch.float32),
    ]
    taught = (
        drawn(tokens, HEADS, WIDTH, scale=2.0),
        drawn(entries, WIDTH),
        drawn(tokens, HEADS, dtype=torch.float32) + 5,
    )
    picks = (draw.integers(12, tokens, 4) - 1).to(device) if selected else None
    return leaves, taught, picks, segments


def outcome(op, leaves, taught, picks, segments, grad):
    """Loss and gradients of the three leaves."""
    q, keys, weights = (x.detach().clone().requires_grad_() for x in leaves)
    attention_q, entries, lse = taught
    layout = segments.layout(entry_rows(RATIO))
    loss = op(
        q, Rows(keys, layout), weights, attention_q, Rows(entries, layout), lse, picks, segments,
        ratio=RATIO, scale=SCALE,
    )  # fmt: skip
    return loss, *torch.autograd.grad(loss, [q, keys, weights], grad.to(loss.dtype))


def check(leaves, taught, picks, segments) -> None:
    grad = Draw("upstream").normal(segments.tokens).to(segments.device)
    got = outcome(indexer_distillation, leaves, taught, picks, segments, grad)
    exact = [x.double() for x in leaves], [x.double() for x in taught]
    want = outcome(reference, *exact, picks, segments, grad)
    assert got[0].dtype == torch.float32 and relative(got[0], want[0]) < 1e-5
    for leaf, a, b in zip(leaves, got[1:], want[1:], strict=True):
        assert a.dtype == leaf.dtype and relative(a, b) < 3e-3


@pytest.mark.parametrize("selected", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("new", [[30], [5, 0, 3, 26, 1]], ids=str)
def test_divergence_and_gradients(new, selected, device):
    check(*lesson(new, device, selected))


@pytest.mark.parametrize("new", [[33], [5, 0, 3, 26, 1]], ids=str)
def test_the_selection_alone(new, device, monkeypatch):
    """Where it pays to look at what is selected only: here always, in runs of a few tokens."""
    monkeypatch.setattr(gathered, "_PAYS", 0.01)
    monkeypatch.setattr(distillation, "SCORES", 2 * 128 * 16)
    leaves, taught, _, segments = lesson(new, device, True)
    draw = Draw("distinct")
    picks = torch.stack([draw.order(12)[:5] - 1 for _ in range(segments.tokens)]).to(device)
    assert gathered.pays(picks, segments, RATIO) and not gathered.pays(None, segments, RATIO)
    check(leaves, taught, picks, segments)
    torch.use_deterministic_algorithms(True)
    try:
        assert not gathered.pays(picks, segments, RATIO)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_entry_selected_twice_counts_once(device, monkeypatch):
    monkeypatch.setattr(gathered, "_PAYS", 0.01)
    leaves, taught, picks, segments = lesson([33], device, True)
    picks[:, 2], picks[:, 3] = picks[:, 0], 1 << 32
    assert gathered.pays(picks, segments, RATIO)
    check(leaves, taught, picks, segments)


def test_nothing_is_selected(device):
    leaves, taught, picks, segments = lesson([30], device, True)
    assert gathered.pays(picks[:, :0], segments, RATIO)
    found = outcome(indexer_distillation, leaves, taught, picks[:, :0], segments, torch.ones(30).to(device))
    assert all((x == 0).all() for x in found)


def test_an_entrys_nan_stays_in_its_document(device, monkeypatch):
    monkeypatch.setattr(gathered, "_PAYS", 0.01)
    leaves, taught, picks, segments = lesson([12, 30], device, True)
    leaves[1][0] = torch.nan
    _, dq, dkeys, dweights = outcome(indexer_distillation, leaves, taught, picks, segments, torch.ones(42).to(device))
    assert dq[12:].isfinite().all() and dkeys[3:].isfinite().all() and dweights[12:].isfinite().all()


def test_rows_at_any_address(device):
    leaves, (q, entries, lse), _, segments = lesson([30], device, False)

    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    assert moved(q).data_ptr() % 16
    check([*map(moved, leaves[:2]), leaves[2]], (moved(q), moved(entries), lse), None, segments)


def test_runs_add_up(device, monkeypatch):
    """The keys of a document get their gradient from several runs."""
    monkeypatch.setattr(distillation, "runs", lambda s, ratio, _: runs(s, ratio, 64 * 16))
    leaves, taught, picks, segments = lesson([72], device, False)
    assert len(runs(segments, RATIO, 64 * 16)) == 2
    check(leaves, taught, picks, segments)


def test_nothing_to_attend_to(device):
    """Entries without any weight, queries without any entry, calls without any token: zeros, and no NaN."""
    leaves, (q, entries, lse), picks, segments = lesson([12], device, True)
    found = outcome(indexer_distillation, leaves, (q, entries, lse + 1e4), None, segments, torch.ones(12).to(device))
    assert all((x == 0).all() for x in found)
    found = outcome(indexer_distillation, leaves, (q, entries, lse), picks * 0 - 1, segments, torch.ones(12).to(device))
    assert all((x == 0).all() for x in found)
    for new in ([], [2, 3]):
        found = outcome(indexer_distillation, *lesson(new, device, False), torch.ones(sum(new)).to(device))
        assert all((x == 0).all() for x in found)


def test_refusal():
    leaves, (q, entries, lse), _, segments = lesson([8], "cpu", False)
    layout = segments.layout(entry_rows(RATIO))
    index = leaves[0], Rows(leaves[1], layout), leaves[2]

    def reason(q=q, entries=entries, lse=lse, **rest) -> str:
        return refusal(*index, q, Rows(entries, layout), lse, segments, **rest) or ""

    assert reason() == ""
    assert "attention's queries are float32" in reason(q=q.float())
    assert "float64" in reason(lse=lse.double())
    assert "6 attention heads" in reason(q=q[:, :6])
    assert "24 numbers" in reason(q=q[..., :24], entries=entries[:, :24])
    assert "batch_invariant" in reason(invariant=True)
