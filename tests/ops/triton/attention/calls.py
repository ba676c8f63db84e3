"""One call of attention with its upstream gradient, what the definition makes of it, and how far a result is off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from undertow.ops.reference.attention import sparse_attention
from undertow.ops.segments import Rows, Segments, entry_rows, window_rows

NAMES = ("q", "window", "entries", "sink")


class Call:
    """Random inputs in bfloat16; `keep` entries a query are selected, -1 or hidden ones among them, all without it."""

    def __init__(
        self, lengths: Sequence[int], *, heads: int = 8, width: int = 64, window: int = 8, ratio: int = 0,
        keep: int | None = None, seed: int = 0, device: str = "cpu", sink: float = 1.0, size: float = 1.0,
    ):  # fmt: skip
        draw = torch.Generator(device).manual_seed(seed)
        tokens, made = sum(lengths), sum(n // ratio for n in lengths) if ratio else 0
        self.segments = Segments.from_lengths(lengths, device=device)
        self.window_size, self.ratio, self.scale = window, ratio, width**-0.5

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=device)

        self.q, self.do = (normal(tokens, heads, width) * size).bfloat16(), normal(tokens, heads, width).bfloat16()
        self.window = normal(tokens, width).bfloat16()
        self.entries = normal(made, width).bfloat16() if ratio else None
        self.sink = normal(heads) * sink
        self.selected = self._selection(keep, draw) if keep is not None else None

    def _selection(self, keep: int, draw: torch.Generator) -> Tensor:
        """Distinct numbers within the document; some are not visible yet, some absent, wherever in the row."""
        most = max(self.segments.new, default=0) // self.ratio + 3
        found = torch.full((self.segments.tokens, keep), -1, dtype=torch.int64, device=self.q.device)
        for start in range(0, self.segments.tokens, 1024):
            here = slice(start, start + 1024)
            rank = torch.rand(len(found[here]), most, generator=draw, device=self.q.device)
            visible = (self.segments.positions[here] + 1) // self.ratio
            rank -= 2.0 * (torch.arange(most, device=self.q.device) >= visible[:, None] + 1)
            order = rank.topk(min(keep, most), 1).indices
            order = order.where(torch.rand(order.shape, generator=draw, device=self.q.device) > 0.1, -1)
            found[here, : order.shape[1]] = order
        return found

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.q, self.window, self.entries, self.sink) if x is not None]

    def run(self, op: Callable, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Output, log-sum-exp and gradients in the order of `leaves`; inputs are cast to `dtype` if one is given."""
        leaves = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in self.leaves]
        window = Rows(leaves[1], self.segments.layout(window_rows(self.window_size)))
        entries = Rows(leaves[2], self.segments.layout(entry_rows(self.ratio))) if self.ratio else None
        o, lse = op(
            leaves[0], window, entries, self.selected, leaves[-1], self.segments,
            window_size=self.window_size, ratio=self.ratio, scale=self.scale,
        )  # fmt: skip
        return o.detach(), lse.detach(), list(torch.autograd.grad(o, leaves, self.do.to(o.dtype)))

    def reference(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, list[Tensor]]:
        return self.run(sparse_attention, dtype)

    def errors(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
        """`|found - wanted| / max(|wanted|, |do| / 1000)` by name, infinite for a result that is not finite."""
        least = 1e-3 * self.do.double().norm()
        names = [name for name in NAMES if name != "entries" or self.ratio]
        off = {}
        for name, got, want in zip(names, found, wanted, strict=True):
            assert got.shape == want.shape, name
            error = (got.double() - want.double()).norm() / torch.maximum(want.double().norm(), least)
            off[name] = error.item() if bool(error.isfinite()) else float("inf")
        return off
