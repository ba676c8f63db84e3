"""Linear cross-entropy of the models' sizes, to be compiled: forward alone, with gradients ahead, and row by row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.ops.triton.compile_all import Case


def _call(mean: bool, learns: bool, tokens: int, width: int) -> None:
    from undertow.ops.triton.cross_entropy.linear import linear_cross_entropy, linear_cross_entropy_mean

    vocabulary = 129280
    hidden, weight = (
        torch.empty(n, width, dtype=torch.bfloat16, device="meta", requires_grad=learns) for n in (tokens, vocabulary)
    )
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    if mean:
        loss, _ = linear_cross_entropy_mean(hidden, weight, labels, tokens, 1e-4)
    else:
        losses, _ = linear_cross_entropy(hidden, weight, labels, 1e-4)
        loss = losses.sum()
    if learns:
        loss.backward()


def cases() -> Iterator[Case]:
    """Calls for both widths."""
    yield "mean of 4096 losses, width 4096", True, partial(_call, True, True, 4096, 4096)
    yield "losses of 4096, width 4096", False, partial(_call, False, True, 4096, 4096)
    yield "losses of 4096 without gradients, width 4096", False, partial(_call, False, False, 4096, 4096)
    yield "mean of 16384 losses, width 7168", False, partial(_call, True, True, 16384, 7168)
