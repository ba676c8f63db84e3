"""Products with quantised weights against float64 products of what the weights read as, in memory that held NaN."""

import random

import pytest
import torch

from tests.ops.compare import Draw, relative
from undertow.ops.triton.grouped import quantised as module
from undertow.ops.triton.grouped import quantised_product as launch
from undertow.ops.triton.grouped.linear import grouped_linear
from undertow.ops.triton.grouped.quantised import grouped_linear_quantised, linear_quantised, refusal
from undertow.ops.triton.grouped.quantised_tiles import DEFAULT, TILES, kind
from undertow.quant.blocks import Block, grid_shape
from undertow.quant.formats import E4M3, E4M3_FNUZ, UE8M0
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import MXFP4, WEIGHTS, Scheme

TOLERANCE = 3e-3
FLOATS = Scheme(E4M3, WEIGHTS.block, "float32")
SCHEMES = {
    "fp8": WEIGHTS,
    "fp8, float32 scales": FLOATS,
    "fnuz": WEIGHTS.in_dialect("fnuz"),
    "fnuz, float32 scales": Scheme(E4M3_FNUZ, WEIGHTS.block, "float32"),
    "mxfp4": MXFP4,
}
SCHEME = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""
    made = torch.empty

    def empty(*shape, **options):
        x = made(*shape, **options)
        return x.fill_(float("nan")) if x.dtype in (torch.bfloat16, torch.float32) else x

    monkeypatch.setattr(torch, "empty", empty)


def rows(*shape, device):
    return Draw("rows", shape).normal(*shape, dtype=torch.bfloat16).to(device)


def weights(scheme, *shape, device):
    """Blocks differ in size, rows too."""
    draw = Draw(str(scheme), shape)
    values = draw.normal(*shape) * torch.exp2(draw.normal(*shape[:-1], 1)) * torch.exp2(draw.normal(1, shape[-1]))
    made = quantise(values * 0.02, scheme)
    return Quantised(made.payload.to(device), made.scales.to(device), scheme.block)


def wanted(x, weight, counts):
    parts = zip(x.cpu().double().split(counts), read(weight), strict=True)
    return torch.cat([mine @ matrix.t() for mine, matrix in parts])


def read(weight):
    return Quantised(weight.payload.cpu(), weight.scales.cpu(), weight.scheme.block).dequantise().double()


def check(scheme, counts, out, depth, device):
    x, weight = rows(sum(counts), depth, device=device), weights(scheme, len(counts), out, depth, device=device)
    y = grouped_linear_quantised(x, weight, torch.tensor(counts, device=device))
    assert y.dtype == torch.bfloat16
    assert relative(y.cpu(), wanted(x, weight, counts)) <= TOLERANCE


@SCHEME
@pytest.mark.parametrize(
    ("counts", "out", "depth"),
    [
        ((1,), 16, 128),
        ((0, 1, 10, 0, 1), 144, 256),
        ((3, 0, 40, 1), 80, 256),
        ((33, 30), 80, 128),
        ((130, 0, 67), 144, 128),
    ],
    ids=["one row", "few", "several", "some", "many"],
)
def test_experts(scheme, counts, out, depth, device):
    check(scheme, counts, out, depth, device)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_sizes(seed, device):
    draw = random.Random(seed)
    counts = tuple(draw.choice((0, 1, 2, 8, draw.randrange(50))) for _ in range(draw.randrange(1, 4)))
    scheme = draw.choice(list(SCHEMES.values()))
    check(scheme, (*counts, 1), draw.randrange(1, 200), 128 * draw.randrange(1, 4), device)


@SCHEME
@pytest.mark.parametrize("shape", [(1,), (2, 3), (65,)], ids=str)
def test_one_matrix(scheme, shape, device):
    x, weight = rows(*shape, 512, device=device), weights(scheme, 72, 512, device=device)
    y = linear_quantised(x, weight)
    assert y.shape == (*shape, 72)
    assert relative(y.cpu(), x.cpu().double() @ read(weight).t()) <= TOLERANCE


@SCHEME
def test_every_code_is_read_as_it_is(scheme, device):
    """A unit matrix as rows gives the weights themselves."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(64)
    if scheme is not MXFP4:
        codes[torch.isin(codes, torch.tensor(scheme.format.nan_codes, dtype=torch.uint8))] = 0
    codes = codes.view(64, 256)[:, torch.arange(256).roll(3)].contiguous()
    depth = 512 if scheme is MXFP4 else 256
    scales = weights(scheme, 64, depth, device="cpu").scales
    weight = Quantised(codes.view(scheme.format.dtype).to(device), scales.to(device), scheme.block)
    y = linear_quantised(torch.eye(depth, dtype=torch.bfloat16, device=device), weight)
    assert torch.equal(y.cpu(), read(weight).t().to(torch.bfloat16))


@SCHEME
def test_no_rows(scheme, device):
    weight = weights(scheme, 2, 32, 128, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    assert grouped_linear_quantised(rows(0, 128, device=device), weight, counts).shape == (0, 32)
    one = weights(scheme, 32, 128, device=device)
    assert linear_quantised(rows(3, 0, 128, device=device), one).shape == (3, 0, 32)


@pytest.mark.filterwarnings("ignore:invalid value")
@SCHEME
def test_an_expert_reads_nothing_of_another(scheme, device):
    """A scale that is not a number, and rows that are none, stay with their expert."""
    counts, x = [5, 3, 20], rows(28, 256, device=device)
    weight = weights(scheme, 3, 48, 256, device=device)
    exact = wanted(x, weight, counts)
    values = read(weight).float()
    values[1] = float("nan")
    hurt = quantise(values, scheme)
    weight = Quantised(hurt.payload.to(device), hurt.scales.to(device), scheme.block)
    x[5:8] = float("inf")
    y = grouped_linear_quantised(x, weight, torch.tensor(counts, device=device)).cpu()
    assert y[5:8].isnan().all()
    y[5:8], exact[5:8] = 0, 0
    # Quantised twice, the weights differ a little.
    assert relative(y, exact) <= 0.05


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("scheme", [FLOATS, MXFP4], ids=["fp8", "mxfp4"])
def test_a_sum_in_parts(scheme, parts, device, monkeypatch):
    monkeypatch.setattr(launch, "_parts", lambda *_: parts)
    check(scheme, (1, 0, 2), 16, 640, device)
    x, weight = rows(7, 640, device=device), weights(scheme, 24, 640, device=device)
    y = linear_quantised(x, weight)
    assert torch.equal(y, linear_quantised(x, weight))
    assert relative(y.cpu(), x.cpu().double() @ read(weight).t()) <= TOLERANCE


def test_parts_fill_the_chip(device, monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 100)
    assert [launch._parts(tiles, 32, torch.device("cpu")) for tiles in (1, 16, 50, 101, 9999)] == [8, 8, 4, 1, 1]
    assert launch._parts(1, 3, torch.device("cpu")) == 1


CHANGES = [
    {"TURNED": 1},
    {"BN": 32, "BK": 64, "GROUP": 1},
    {"TURNED": 1, "BM": 32, "BN": 128, "GROUP": 2},
    {"TURNED": 1, "BM": 8},
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("scheme", [FLOATS, MXFP4], ids=["fp8", "mxfp4"])
def test_every_form_of_launch(scheme, change, device, monkeypatch):
    monkeypatch.setattr(module, "tiles", lambda _, name: {**DEFAULT[name], **change})
    check(scheme, (40, 0, 3), 80, 256, device)


def test_operands_as_they_come(device):
    """Rows that are a part of wider ones, counts in int32."""
    counts = [20, 3]
    x, weight = rows(23, 256, device=device)[:, 64:192], weights(WEIGHTS, 2, 32, 128, device=device)
    y = grouped_linear_quantised(x, weight, torch.tensor(counts, dtype=torch.int32, device=device))
    assert relative(y.cpu(), wanted(x, weight, counts)) <= TOLERANCE


@pytest.mark.parametrize("scheme", [WEIGHTS, WEIGHTS.in_dialect("fnuz"), MXFP4], ids=["fp8", "fnuz", "mxfp4"])
def test_many_rows_take_the_plain_product_of_decoded_weights(scheme, device, monkeypatch):
    monkeypatch.setattr(module, "MANY_ROWS", 20)
    monkeypatch.setattr(module, "product", None)
    counts = [57, 0, 3]
    x, weight = rows(60, 256, device=device), weights(scheme, 3, 48, 256, device=device)
    counted = torch.tensor(counts, device=device)
    y = grouped_linear_quantised(x, weight, counted)
    assert torch.equal(y, grouped_linear(x, weight.dequantise(torch.bfloat16), counted))
    assert relative(y.cpu(), wanted(x, weight, counts)) <= TOLERANCE


def test_which_weights_are_decoded():
    def decoded(scheme, rows, *shape):
        lead, wide = shape[:-1], shape[-1] // 2 if scheme is MXFP4 else shape[-1]
        payload = torch.zeros(*lead, wide, dtype=torch.uint8, device="meta").view(scheme.format.dtype)
        dtype = torch.float32 if scheme is FLOATS else UE8M0.dtype
        scales = torch.zeros(grid_shape(shape, scheme.block), dtype=torch.uint8, device="meta").to(dtype)
        return module._decodes(Quantised(payload, scales, scheme.block), rows, shape[0])

    assert decoded(WEIGHTS, 512 * 32, 32, 4096, 4096) and decoded(MXFP4, 512 * 32, 32, 4096, 4096)
    assert not decoded(WEIGHTS, 512 * 32 - 1, 32, 4096, 4096)
    # 2 GiB, and more.
    assert decoded(WEIGHTS, 1 << 20, 64, 4096, 4096) and not decoded(WEIGHTS, 1 << 20, 65, 4096, 4096)
    # Rounded to bfloat16 they would be other numbers; the plain product has no matrices of 24 rows.
    assert not decoded(FLOATS, 1 << 20, 32, 4096, 4096) and not decoded(WEIGHTS, 1 << 20, 2, 24, 128)


@pytest.mark.parametrize("scheme", [WEIGHTS, MXFP4], ids=["fp8", "mxfp4"])
def test_decoded_weights_are_exact(scheme):
    weight = weights(scheme, 2, 128, 256, device="cpu")
    assert torch.equal(weight.dequantise(torch.bfloat16).float(), weight.dequantise())


def test_kinds():
    assert [kind(rows, 4) for rows in (1, 12, 13, 64, 65, 256, 257)] == [
        *("few", "few", "several", "several", "some", "some", "many")
    ]
    assert all(set(chip) <= set(DEFAULT) for chip in TILES.values())
    # A step of FP8 stays within a block, and so do the columns of a tile.
    for tile in (tile for chip in (DEFAULT, *TILES.values()) for name, tile in chip.items() if "fp8" in name):
        assert 128 % tile["BN"] == 0 and 128 % tile["BK"] == 0


def test_refusals():
    x, weight = torch.ones(4, 128, dtype=torch.bfloat16), quantise(torch.ones(2, 16, 128), WEIGHTS)
    assert refusal(x, weight) is None
    assert refusal(x, quantise(torch.ones(2, 16, 128), MXFP4)) is None
    learns = x.clone().requires_grad_()
    assert refusal(learns, weight) == "gradients of the rows are wanted, and there is no kernel for them"
    with torch.no_grad():
        assert refusal(learns, weight) is None
    assert refusal(x.float(), weight) == "rows are float32; they must be bfloat16"
    assert refusal(x, weight, invariant=True) == (
        "tiles and parts of a sum depend on how many rows share the call, and batch_invariant is on"
    )
    other = quantise(torch.ones(2, 16, 128), Scheme(E4M3, Block(1, 128)))
    assert refusal(x, other) == ("weights are e4m3, blocks of 1x128, ue8m0 scales; blocks of FP8 must be 128x128")
    assert refusal(x, quantise(torch.ones(2, 16, 96), MXFP4)) == (
        "matrices have 96 columns, which is not a multiple of 128"
    )
    turned = Quantised(weight.payload.transpose(0, 1)[:, :1], weight.scales[:1].expand(16, 1, 1), WEIGHTS.block)
    assert refusal(x, turned) == (
        "the codes or scales are not contiguous, or the codes' address is not a multiple of 16"
    )
