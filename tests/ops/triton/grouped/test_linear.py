"""Products per expert and their gradients against float64 on the same inputs, in memory that held NaN."""

import random

import pytest
import torch

from tests.ops.compare import Draw, relative
from undertow.ops.triton.grouped import linear as module
from undertow.ops.triton.grouped import tiles as launches
from undertow.ops.triton.grouped.linear import add_weight_gradient, grouped_linear, refusal
from undertow.ops.triton.grouped.ragged import table
from undertow.ops.triton.grouped.tiles import DEFAULT

TOLERANCE = 3e-3
CALLS = [
    ((1,), (16, 16)),
    ((0, 5, 0), (144, 80)),
    ((3, 0, 129, 1, 0, 128), (48, 160)),
    ((128, 32, 64), (80, 32)),
    ((2,) * 7, (16, 144)),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""
    made = torch.empty

    def empty(*shape, **options):
        x = made(*shape, **options)
        return x.fill_(float("nan") if x.is_floating_point() else 1 << 29)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(x.shape, dtype=x.dtype, device=x.device))


class Call:
    """Rows, weights, upstream gradient and counts of one call, and what float64 makes of them."""

    def __init__(self, counts, size, device):
        draw, (out, depth) = Draw(counts, size), size
        self.spans = counts
        self.x, self.weight, self.grad = (
            draw.normal(*shape, dtype=torch.bfloat16).to(device)
            for shape in ((sum(counts), depth), (len(counts), out, depth), (sum(counts), out))
        )
        self.counts = torch.tensor(counts, device=device)

    def wanted(self):
        rows, grads = (x.double().split(self.spans) for x in (self.x, self.grad))
        parts = zip(rows, self.weight.double(), grads, strict=True)
        found = [(x @ w.t(), g @ w, g.t() @ x) for x, w, g in parts]
        y, grad_x, grad_weight = zip(*found, strict=True)
        return torch.cat(y), torch.cat(grad_x), torch.stack(grad_weight)

    def found(self, **options):
        x, weight = self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()
        y = grouped_linear(x, weight, self.counts, **options)
        return y, *torch.autograd.grad(y, (x, weight), self.grad)

    def check(self):
        for name, found, wanted in zip(("y", "x", "weight"), self.found(), self.wanted(), strict=True):
            assert found.dtype == torch.bfloat16
            assert relative(found, wanted) <= TOLERANCE, name


@pytest.mark.parametrize(("counts", "size"), CALLS)
def test_products_and_gradients(counts, size, device):
    Call(counts, size, device).check()


@pytest.mark.parametrize("seed", range(5))
def test_drawn_sizes(seed, device):
    draw = random.Random(seed)
    counts = tuple(draw.choice((0, 1, 7, draw.randrange(200))) for _ in range(draw.randrange(1, 6)))
    Call(counts, (16 * draw.randrange(1, 12), 16 * draw.randrange(1, 12)), device).check()


@pytest.mark.parametrize("counts", [(0,), (0, 0, 0)])
def test_no_rows(counts, device):
    call = Call(counts, (32, 48), device)
    y, grad_x, grad_weight = call.found()
    assert y.shape == (0, 32)
    assert grad_x.shape == (0, 48)
    assert torch.equal(grad_weight, torch.zeros_like(call.weight))
    main = torch.ones(call.weight.shape, device=device)
    add_weight_gradient(main, call.grad, call.x, call.counts)
    assert (main == 1).all()


def test_experts_without_rows_have_zero_gradient(device):
    grad_weight = Call((0, 40, 0), (32, 48), device).found()[2]
    assert not grad_weight[::2].any()
    assert grad_weight[1].all()


CHANGES = [
    {"PROGRAMS": 1, "FLATTEN": 1},
    {"PROGRAMS": 2, "FLATTEN": 1, "BM": 64, "BK": 64, "GROUP": 1},
    {"PROGRAMS": 1, "FLATTEN": 0, "BN": 64, "PARTS": 2, "GROUP": 3},
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_form_of_launch(change, device, monkeypatch):
    monkeypatch.setattr(module, "tiles", lambda _, kernel: {**DEFAULT[kernel], **change})
    Call((70, 0, 3, 129), (144, 80), device).check()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("hurt", [1, 3])
def test_an_expert_reads_nothing_of_another(hurt, device):
    """What is infinite or not a number stays with its expert, before and after it."""
    call = Call((5, 33, 20, 1, 130), (48, 80), device)
    wanted = call.wanted()
    whole = [call.counts[:hurt].sum(), call.counts[: hurt + 1].sum()]
    own = slice(*(int(edge) for edge in whole))
    call.x[own], call.grad[own], call.weight[hurt] = torch.nan, torch.inf, torch.nan
    y, grad_x, grad_weight = call.found()
    for found, exact, at in ((y, wanted[0], own), (grad_x, wanted[1], own), (grad_weight, wanted[2], hurt)):
        assert found[at].isnan().any()
        found[at], exact[at] = 0, 0
        assert relative(found, exact) <= TOLERANCE


def test_a_row_has_the_same_bits_among_any_others(device):
    """Its place in a tile, what shares that, and how many rows there are make no difference."""
    call = Call((140, 60), (144, 160), device)
    y, grad_x, _ = call.found(invariant=True)
    others = Call((9, 17), (144, 160), device)
    others.weight = call.weight
    for place, row in ((0, 133), (4, 3), (25, 199)):
        others.x[place], others.grad[place] = call.x[row], call.grad[row]
    seen = others.found(invariant=True)
    for place, row in ((0, 133), (4, 3), (25, 199)):
        assert torch.equal(seen[0][place], y[row])
        assert torch.equal(seen[1][place], grad_x[row])


def test_the_same_bits_again_whoever_takes_the_tiles(device, monkeypatch):
    call = Call((130, 0, 21), (144, 80), device)
    first = call.found()
    assert all(torch.equal(a, b) for a, b in zip(first, call.found(), strict=True))
    monkeypatch.setattr(module, "tiles", lambda _, kernel: {**DEFAULT[kernel], "PROGRAMS": 1})
    monkeypatch.setattr(launches, "multiprocessors", lambda _: 3)
    assert all(torch.equal(a, b) for a, b in zip(first, call.found(), strict=True))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_main_gradients_are_added_to_in_float32(parts, device, monkeypatch):
    tile = {**DEFAULT["outer added"], "PARTS": parts}
    monkeypatch.setattr(module, "tiles", lambda *_: tile)
    call = Call((70, 0, 33), (144, 80), device)
    main = Draw("main").normal(*call.weight.shape).to(device)
    wanted = main.double() + call.wanted()[2]
    kept = main[1].clone()
    add_weight_gradient(main, call.grad, call.x, call.counts)
    assert relative(main, wanted) <= 1e-5
    assert torch.equal(main[1], kept)


def test_operands_need_not_be_contiguous(device):
    call = Call((20, 3), (32, 48), device)
    wanted = call.wanted()
    call.x = torch.cat([call.x, call.x], 1)[:, :48]
    call.grad = call.grad.t().contiguous().t()
    call.counts = call.counts.int()
    for found, exact in zip(call.found(), wanted, strict=True):
        assert relative(found, exact) <= TOLERANCE


@pytest.mark.parametrize("leaf", [0, 1])
def test_one_gradient_alone(leaf, device):
    call = Call((20, 3), (32, 48), device)
    leaves = [call.x, call.weight]
    leaves[leaf].requires_grad_()
    y = grouped_linear(*leaves, call.counts)
    (found,) = torch.autograd.grad(y, leaves[leaf], call.grad)
    leaves[leaf].requires_grad_(False)
    assert relative(found, call.wanted()[1 + leaf]) <= TOLERANCE


def test_table(device):
    order = table(torch.tensor([3, 0, 130, 1, 128], device=device), 262, 64)
    assert order.spans.tolist() == [0, 3, 3, 0, 3, 130, 133, 1, 134, 128, 7]
    assert order.most == 262 // 64 + 5
    rows = [[0, 0, 1, 0, 3], *[[2, 1, 3, 3, 130]] * 3, [3, 4, 1, 133, 1], *[[4, 5, 2, 134, 128]] * 2]
    assert order.tiles[:7].tolist() == rows


def test_a_table_holds_no_more_tiles_than_there_is_room_for(device):
    """Counts of a larger sum than the rows are a mistake, which must not write elsewhere."""
    order = table(torch.tensor([3, 500, 9], device=device), 64, 32)
    assert order.spans.tolist() == [0, 3, 3, 61, 64, 0, 3]
    assert order.tiles[:3].tolist() == [[0, 0, 1, 0, 3], [1, 1, 2, 3, 61], [1, 1, 2, 3, 61]]


def test_refusals():
    x, weight = torch.ones(4, 32, dtype=torch.bfloat16), torch.ones(2, 16, 32, dtype=torch.bfloat16)
    assert refusal(x, weight) is None
    assert refusal(x, weight, invariant=True) is None
    assert refusal(x.float(), weight) == "rows are float32 and weights bfloat16; both must be bfloat16"
    assert refusal(x, weight.half()) == "rows are bfloat16 and weights float16; both must be bfloat16"
    assert refusal(x, weight[:, :8]) == "matrices are 8 x 32, and a side is not a multiple of 16"
    assert refusal(x, weight[:, :, :24]) == "matrices are 16 x 24, and a side is not a multiple of 16"
    turned = torch.ones(2, 32, 16, dtype=torch.bfloat16).transpose(1, 2)
    assert refusal(x, turned) == "the weights are not contiguous from an address that is a multiple of 16"


def test_counts_beyond_the_rows_write_nothing_behind_them(device):
    """The last experts get what rows there are; what lies behind the result keeps its numbers."""
    draw = Draw("beyond")
    x = draw.normal(40, 32, dtype=torch.bfloat16).to(device)
    weight = draw.normal(3, 16, 32, dtype=torch.bfloat16).to(device)
    given, due = (torch.tensor(counts, device=device) for counts in ([30, 50, 1000], [30, 10, 0]))
    assert torch.equal(grouped_linear(x, weight, given), grouped_linear(x, weight, due))
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = torch.autograd.grad(grouped_linear(*leaves, given).sum(), leaves)
    wanted = torch.autograd.grad(grouped_linear(*leaves, due).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
