"""The mended interpreter computes with bfloat16 as a GPU does: rounded to nearest even, whatever the operation."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def product(a, b, c, M, N, K, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    row, column = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    sum = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(0, K, DEPTH):
        inner = k + tl.arange(0, DEPTH)
        left = tl.load(a + row[:, None] * K + inner[None, :])
        sum = tl.dot(left, tl.load(b + inner[:, None] * N + column[None, :]), sum)
    tl.store(c + row[:, None] * N + column[None, :], sum.to(c.dtype.element_ty))


@triton.jit
def elementwise(x, y, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, tl.load(x + n) * tl.load(y + n) + tl.load(x + n))


@triton.jit
def reductions(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    v = tl.load(x + n)
    tl.store(out, tl.sum(v).to(tl.float32))
    tl.store(out + 1, tl.max(v, 0).to(tl.float32))
    tl.store(out + 2, tl.argmax(v, 0).to(tl.float32))
    tl.store(out + 3, tl.sum(tl.where(v < -1.0, 1.0, 0.0)))
    tl.store(out + 4 + n, tl.cumsum(-v).to(tl.float32))


@triton.jit
def casts(x, out, back, N: tl.constexpr):
    n = tl.arange(0, N)
    narrow = tl.load(x + n).to(tl.bfloat16)
    tl.store(out + n, narrow)
    tl.store(back + n, narrow.to(tl.float32))


@triton.jit
def library(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    v = tl.load(x + n)
    tl.store(out + n, libdevice.exp(v))
    tl.store(out + N + n, libdevice.expm1(v))
    tl.store(out + 2 * N + n, libdevice.log1p(v))


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_product_with_a_bound_of_the_loop_from_an_argument(device, wanted):
    torch.manual_seed(0)
    a, b = (torch.randn(64, 96, device=device).bfloat16(), torch.randn(96, 32, device=device).bfloat16())
    c = torch.full((64, 32), float("nan"), device=device, dtype=wanted)
    product[(2, 1)](a, b, c, 64, 32, 96, 32, 32)
    exact = a.double() @ b.double()
    assert ((c.double() - exact).norm() / exact.norm()).item() < (1e-6 if wanted is torch.float32 else 3e-3)


def test_elementwise_operations_round_each_time(device):
    torch.manual_seed(1)
    x, y = torch.randn(128, device=device).bfloat16(), torch.randn(128, device=device).bfloat16()
    out = torch.empty_like(x)
    elementwise[(1,)](x, y, out, 128)
    # A chip may keep the product in full before it adds.
    once = (x.float() * y.float() + x.float()).bfloat16()
    assert torch.equal(out, x * y + x) or torch.equal(out, once)


def test_reductions(device):
    x = torch.randint(-3, 4, (64,), generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    x[17] = 5
    out = torch.full((68,), float("nan"), device=device)
    reductions[(1,)](x, out, 64)
    wide = x.float()
    head = torch.stack((wide.sum(), wide.max(), wide.argmax().float(), (wide < -1).float().sum()))
    assert torch.equal(out, torch.cat((head, (-wide).cumsum(0))))


def test_casts_round_to_nearest_even(device):
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x00008000, 0x7F7FFFFF, 0x7F800000])
    x = torch.cat((bits.to(torch.int32).view(torch.float32), -torch.linspace(0.1, 7.3, 25))).to(device)
    out, back = torch.empty(32, dtype=torch.bfloat16, device=device), torch.empty(32, device=device)
    casts[(1,)](x, out, back, 32)
    assert torch.equal(out, x.bfloat16()) and torch.equal(back, x.bfloat16().float())


def test_functions_of_the_library(device):
    x = torch.cat((torch.logspace(-9, 1, 32), -torch.logspace(-9, -0.1, 32))).to(device)
    out = torch.empty(3, 64, device=device)
    library[(1,)](x, out, 64)
    exact = x.double()
    torch.testing.assert_close(
        out.double(), torch.stack((exact.exp(), exact.expm1(), exact.log1p())), rtol=2.5e-7, atol=0.0
    )
