"""Batch-invariant linear layers in Triton: values against float64, bits of rows in any company, poisoned results."""

import random
from itertools import pairwise

import pytest
import torch

from tests.ops.compare import Draw, relative
from undertow.ops.registry import Machine, choose, function
from undertow.ops.triton.invariant import product as launching
from undertow.ops.triton.invariant import tiles as launches
from undertow.ops.triton.invariant.linear import block_linear, linear, refusal, wide_linear
from undertow.ops.triton.invariant.tiles import TILES

BF16 = torch.bfloat16
TOLERANCE = {BF16: 3e-3, torch.float32: 1e-6}
OPS = {"linear": linear, "wide_linear": wide_linear, "block_linear": block_linear}
ROWS = 70


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""
    made = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: made(*shape, **options).fill_(torch.nan))


def operands(op, rows, size, device, groups=3):
    """Rows and weight of an operator, `size` its outputs and inputs."""
    draw, (out, depth) = Draw(op, rows, size), size
    shapes = ((rows, groups, depth), (groups, out, depth)) if op == "block_linear" else ((rows, depth), (out, depth))
    return [draw.normal(*shape, dtype=BF16).to(device) for shape in shapes]


def exact(op, x, weight):
    if op == "block_linear":
        return torch.einsum("tgk,gok->tgo", x, weight)
    return torch.nn.functional.linear(x, weight)


def check(op, x, weight):
    leaves = [operand.detach().requires_grad_() for operand in (x, weight)]
    doubles = [operand.detach().double().requires_grad_() for operand in (x, weight)]
    y, wanted = OPS[op](*leaves), exact(op, *doubles)
    kind = torch.float32 if op == "wide_linear" else x.dtype
    assert y.dtype == kind and y.is_contiguous()
    assert relative(y, wanted) <= TOLERANCE[kind]
    grad = Draw("upstream").normal(*y.shape, dtype=x.dtype).to(y)
    found = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    for mine, other in zip(found, torch.autograd.grad(wanted, doubles, grad.double()), strict=True):
        assert mine.dtype == x.dtype and relative(mine, other) <= TOLERANCE[x.dtype]
    again = torch.autograd.grad(OPS[op](*leaves), leaves, grad)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("rows", "size"), [(1, (64, 64)), (65, (33, 70)), (3, (1, 1)), (70, (72, 40))])
def test_products_and_gradients(op, rows, size, device):
    check(op, *operands(op, rows, size, device))


@pytest.mark.parametrize("seed", range(4))
def test_drawn_sizes(seed, device):
    draw = random.Random(seed)
    size = draw.randrange(1, 150), draw.randrange(1, 150)
    op = ("linear", "wide_linear", "block_linear")[seed % 3]
    check(op, *operands(op, draw.randrange(1, 90), size, device, draw.randrange(1, 4)))


@pytest.mark.parametrize("form", TILES["sm_90"])
def test_every_form_of_sm_90(form, device, monkeypatch):
    monkeypatch.setattr(launching, "tiles", lambda *_: form)
    check("block_linear", *operands("block_linear", 33, (40, 136), device, groups=2))
    check("linear", *operands("linear", 3, (300, 72), device))


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op, device):
    x, weight = operands(op, 0, (32, 48), device)
    y = OPS[op](x.requires_grad_(), weight.requires_grad_())
    assert y.shape == ((0, 3, 32) if op == "block_linear" else (0, 32))
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert grad_x.shape == x.shape and torch.equal(grad_weight, torch.zeros_like(weight))


def test_operands_need_not_be_contiguous(device):
    x, weight = operands("linear", 20, (40, 50), device)
    wanted = linear(x, weight)
    assert torch.equal(linear(x.t().contiguous().t(), weight.t().contiguous().t()), wanted)
    whole = torch.cat([weight, weight], 1)
    assert torch.equal(linear(torch.cat([x, x], 1)[:, 50:], whole[:, :50]), wanted)
    shifted = torch.zeros(x.numel() + 1, dtype=BF16, device=device)[1:].view_as(x).copy_(x)
    assert torch.equal(linear(shifted, weight), wanted)
    assert torch.equal(linear(x.view(4, 5, 50), weight), wanted.view(4, 5, 40))
    assert torch.equal(linear(x[:1].expand(7, 50), weight), wanted[:1].expand(7, 40))


@pytest.mark.parametrize("leaf", [0, 1])
def test_one_gradient_alone(leaf, device):
    leaves = operands("block_linear", 20, (40, 50), device)
    leaves[leaf].requires_grad_()
    y = block_linear(*leaves)
    (found,) = torch.autograd.grad(y, leaves[leaf], torch.ones_like(y))
    assert found.shape == leaves[leaf].shape


def split(op, x, weight, parts):
    return torch.cat([OPS[op](part, weight) for part in x.split(parts)])


@pytest.mark.parametrize("op", OPS)
def test_a_row_has_the_same_bits_in_any_company(op, device, size=(37, 75)):
    x, weight = operands(op, ROWS, size, device, groups=2)
    whole, draw = OPS[op](x, weight), random.Random(repr((op, size)))
    assert torch.equal(split(op, x[30:34], weight, 1), whole[30:34])
    for _ in range(2):
        cuts = sorted({0, ROWS, *(draw.randrange(ROWS) for _ in range(draw.randrange(1, 5)))})
        assert torch.equal(split(op, x, weight, [b - a for a, b in pairwise(cuts)]), whole)
    order = Draw("order").order(ROWS)
    assert torch.equal(OPS[op](x[order], weight), whole[order])
    padded = torch.cat([torch.full_like(x[:5], torch.nan), x, torch.full_like(x[:30], torch.inf)])
    assert torch.equal(OPS[op](padded, weight)[5 : 5 + ROWS], whole)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1024, 4096), (300, 1000), (4096, 8192)])
def test_all_forms_of_a_chip_give_the_same_bits(size, device, monkeypatch):
    x, weight = operands("linear", 300, size, device)
    wanted = wide_linear(x, weight)
    for form in launches.forms(x.device):
        monkeypatch.setattr(launching, "tiles", lambda *_, form=form: form)
        assert torch.equal(wide_linear(x, weight), wanted), form


def test_forms_follow_the_size(monkeypatch):
    monkeypatch.setattr(launches, "architecture", lambda _: "sm_90")
    monkeypatch.setattr(launches, "multiprocessors", lambda _: 132)
    device, known = torch.device("meta"), TILES["sm_90"]

    def form(rows, columns, groups=1):
        return known.index(launches.tiles(device, groups, rows, columns))

    assert [form(rows, 129280) for rows in (1, 16, 17, 32, 33, 64, 65, 4096)] == [5, 5, 4, 4, 3, 3, 0, 0]
    assert [form(rows, 1024) for rows in (1, 64, 512, 4096)] == [7, 6, 3, 0]
    assert (form(1, 4096), form(4096, 256), form(4096, 512), form(4096, 512, 8)) == (6, 2, 1, 0)


def test_the_registry_takes_them_for_a_fixed_order_alone(device):
    x, weight = operands("linear", 5, (16, 32), device)
    machine = Machine("cuda", "sm_90")
    for op in OPS:
        factors = operands(op, 5, (16, 32), device)
        assert torch.equal(function(choose(op, machine, invariant=True), True)(*factors), OPS[op](*factors))
    assert torch.equal(function(choose("linear", machine))(x, weight), torch.nn.functional.linear(x, weight))


def test_refusals():
    x, weight = torch.ones(4, 32), torch.ones(16, 32)
    assert refusal(x.bfloat16(), weight.bfloat16()) is None
    told = "rows are {} and weights {}; both must be bfloat16"
    assert refusal(x.bfloat16(), weight) == told.format("bfloat16", "float32")
    assert refusal(x.half(), weight.half()) == told.format("float16", "float16")
    assert refusal(x[:, :0].bfloat16(), weight[:, :0].bfloat16()) == "a sum of no numbers"
