"""The indexer's kernels on a GPU, at sizes of use: scores, the exact choice, distillation, memory."""

import pytest
import torch

from undertow.ops.reference.distillation import indexer_distillation as reference_distillation
from undertow.ops.reference.indexer import indexer_scores as reference_scores
from undertow.ops.reference.router import stable_topk
from undertow.ops.segments import Rows, Segments, entry_rows
from undertow.ops.triton.indexer.distillation import indexer_distillation
from undertow.ops.triton.indexer.runs import SCORES
from undertow.ops.triton.indexer.select import indexer_scores, indexer_select

pytestmark = pytest.mark.gpu

RATIO = 4
LENGTHS = [[1], [127], [4095], [1, 127, 128, 129, 1500, 0, 3], [64] * 40, [5000, 3000]]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""
    made = torch.empty

    def empty(*shape, **options):
        x = made(*shape, **options)
        return x.fill_(float("nan") if x.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch, "empty", empty)


def operands(new: list[int], heads: int = 64, width: int = 128):
    generator = torch.Generator("cuda").manual_seed(len(new) + sum(new))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    segments = Segments.from_lengths(new, device="cuda")
    keys = Rows(drawn(sum(n // RATIO for n in new), width).bfloat16(), segments.layout(entry_rows(RATIO)))
    q = drawn(segments.tokens, heads, width).bfloat16()
    return q, keys, drawn(segments.tokens, heads) * (heads * width) ** -0.5, segments


def best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The choice of the reference, in ascending order."""
    picks = stable_topk(scores, k)
    picks = torch.where(torch.isneginf(scores.gather(1, picks)), 1 << 40, picks).sort(1)[0]
    return torch.nn.functional.pad(torch.where(picks == 1 << 40, -1, picks), (0, k - picks.shape[1]), value=-1)


@pytest.mark.parametrize("new", LENGTHS, ids=lambda new: f"{len(new)} documents of {sum(new)}")
@pytest.mark.parametrize(("heads", "width"), [(64, 128), (16, 64)])
def test_scores_and_choice(new, heads, width):
    q, keys, weights, segments = operands(new, heads, width)
    got, want = indexer_scores(q, keys, weights, segments, RATIO), reference_scores(q, keys, weights, segments, RATIO)
    assert torch.equal(got.isneginf(), want.isneginf())
    seen = ~want.isneginf()
    assert (got[seen] - want[seen]).norm() <= 1e-4 * want[seen].norm()
    for k in (1, 100, 512):
        assert torch.equal(indexer_select(q, keys, weights, k, segments, RATIO), best(got, k))


def test_choice_is_the_same_every_time():
    q, keys, weights, segments = operands([6000, 77])
    first = indexer_select(q, keys, weights, 512, segments, RATIO)
    assert all(torch.equal(indexer_select(q, keys, weights, 512, segments, RATIO), first) for _ in range(5))


def test_memory_of_the_choice():
    """Scores of 32,768 tokens would take 1 GiB: only a part exists at once."""
    q, keys, weights, segments = operands([32768])
    indexer_select(q[:4], keys, weights[:4], 64, Segments.from_lengths([4], device="cuda"), RATIO)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = indexer_select(q, keys, weights, 512, segments, RATIO)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= SCORES * 4 + found.nbytes + (16 << 20)


@pytest.mark.parametrize("selected", [None, 32, 150])
@pytest.mark.parametrize("new", [[1024], [5, 300, 1, 700, 130]], ids=str)
def test_distillation(new, selected):
    q, keys, weights, segments = operands(new)
    generator = torch.Generator("cuda").manual_seed(1)
    attention_q = torch.randn(segments.tokens, 64, 512, device="cuda", generator=generator).bfloat16()
    entries = torch.randn(len(keys.data), 512, device="cuda", generator=generator).bfloat16()
    lse = torch.randn(segments.tokens, 64, device="cuda", generator=generator) + 6
    picks = None if selected is None else indexer_select(q, keys, weights, selected, segments, RATIO)
    grad = torch.randn(segments.tokens, device="cuda", generator=generator)
    results = []
    for op, wide in (
        (indexer_distillation, torch.Tensor.clone),
        (reference_distillation, torch.Tensor.double),
    ):
        leaves = [wide(x).detach().requires_grad_() for x in (q, keys.data, weights)]
        loss = op(
            leaves[0], Rows(leaves[1], keys.layout), leaves[2], wide(attention_q), Rows(wide(entries), keys.layout),
            wide(lse), picks, segments, ratio=RATIO, scale=512**-0.5,
        )  # fmt: skip
        results.append((loss, *torch.autograd.grad(loss, leaves, wide(grad))))
    for got, want, tolerance in zip(*results, (1e-4, 3e-3, 3e-3, 3e-3), strict=True):
        assert (got - want).norm() <= tolerance * want.norm()
