"""Ways to compare an operator with its definition: forward and backward, by relative norm or to the bit."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Relative norms. bf16 results are float32 sums rounded once, which costs about 2e-3.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-3}
DTYPES = tuple(TOLERANCE)


class Draw:
    """Normal and integer tensors from one seed: the name of the case."""

    def __init__(self, *seed: object):
        self.generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return (x * scale).to(dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)


def island(dtype: torch.dtype) -> torch.dtype:
    """Type of what stays float32 in a bf16 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def relative(got: Tensor, want: Tensor) -> float:
    """`|got - want| / |want|` in float64; 0 for two zeros."""
    assert got.shape == want.shape, (got.shape, want.shape)
    difference = (got.double() - want.double()).norm()
    return (difference / want.double().norm().clamp(min=1e-300)).item() if difference != 0 else difference.item()


def _tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _differentiable(outputs: Any) -> list[Tensor]:
    return [o for o in _tuple(outputs) if isinstance(o, Tensor) and o.requires_grad]


def upstream(outputs: Sequence[Tensor], seed: object = 0) -> list[Tensor]:
    """One random gradient for each output, in its type."""
    draw = Draw("upstream", seed)
    return [draw.normal(*o.shape, dtype=o.dtype) for o in outputs]


def gradients(outputs: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Gradients of the differentiable outputs by `inputs`; random upstream ones by default, zeros where unused."""
    outs = _differentiable(outputs)
    grads = upstream(outs) if grads is None else grads
    found = torch.autograd.grad(outs, inputs, grads, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def check(
    op: Callable[..., Any],
    definition: Callable[..., Any],
    inputs: Sequence[Tensor],
    tolerance: float | None = None,
) -> None:
    """`op(*inputs)` equals `definition` of the float64 copies, outputs and gradients, each by relative norm."""
    tolerance = tolerance or TOLERANCE[inputs[0].dtype]
    mine = [x.detach().clone().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, want = _tuple(op(*mine)), _tuple(definition(*exact))
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert relative(g, w) <= tolerance, (f"output {i}", relative(g, w))
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if g.requires_grad]
    grads = upstream([g for g, _ in pairs])
    grad_got = gradients([g for g, _ in pairs], mine, grads)
    grad_want = gradients([w for _, w in pairs], exact, [g.double() for g in grads])
    for i, (g, w, x) in enumerate(zip(grad_got, grad_want, inputs, strict=True)):
        assert g.dtype == x.dtype
        assert relative(g, w) <= tolerance, (f"gradient {i}", relative(g, w))


def same_bits(got: Any, want: Any) -> bool:
    """Equal to the last bit, NaN like any other value."""
    return all(
        g.shape == w.shape and torch.equal(torch.nan_to_num(g, nan=12345.0), torch.nan_to_num(w, nan=12345.0))
        for g, w in zip(_tuple(got), _tuple(want), strict=True)
    )
