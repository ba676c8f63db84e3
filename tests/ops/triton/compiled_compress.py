"""Compressor pooling of the models' sizes, to be compiled: windows of 8 and of 128, the indexer's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.ops.triton.compile_all import Case


def _call(rows: int, windows: int, slots: int, channels: int, learns: bool) -> None:
    from undertow.ops.triton.compress.pool import compress_pool

    u, v, ape = (
        torch.empty(n, channels, dtype=torch.float32, device="meta", requires_grad=learns) for n in (rows, rows, slots)
    )
    entry, _ = compress_pool(u, v, ape, torch.empty(windows, slots, dtype=torch.int64, device="meta"))
    if learns:
        entry.backward(torch.empty_like(entry))


def cases() -> Iterator[Case]:
    """Calls of 4096 tokens; sizes of the two models are the same."""
    yield "windows of 8", True, partial(_call, 8192, 1024, 8, 512, True)
    yield "windows of 8, the indexer's", False, partial(_call, 8192, 1024, 8, 128, True)
    yield "windows of 128", False, partial(_call, 4096, 32, 128, 512, True)
    yield "windows of 8 without gradients", False, partial(_call, 8192, 1024, 8, 512, False)
