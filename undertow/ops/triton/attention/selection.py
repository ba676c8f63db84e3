"""What a slab's queries selected, in the shape its form reads: one bit an entry, or rows with the chosen ones first."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.attention.geometry import COLUMNS, Sight, Slab

Chosen = Tensor | tuple[Tensor, Tensor] | None
"""Of a slab: bits (dense form), rows and their counts (gather form), or None where every visible entry is read."""


@triton.jit
def _chosen(selected, low, high, token, K: tl.constexpr, SLOTS: tl.constexpr):
    """Flat rows int32 `[SLOTS]` that a token selected, and which of them count."""
    slot = tl.arange(0, SLOTS)
    number = tl.load(selected + token.to(tl.int64) * K + slot, slot < K, other=-1).to(tl.int32)
    first = tl.load(low + token)
    return first + number, (number >= 0) & (number < tl.load(high + token) - first)


@triton.jit
def pack_bits(
    selected, low, high, bits, column, columns,
    K: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The bits of one token of the slab, cleared and then set one by one; pointers begin at the slab."""
    token = tl.program_id(0)
    row, on = _chosen(selected, low, high, token, K, SLOTS)
    own = bits + token.to(tl.int64) * (columns // 32)
    word = tl.arange(0, WORDS)
    tl.store(own + word, tl.zeros((WORDS,), tl.int32), word < columns // 32)
    tl.debug_barrier()
    at = row - column
    bit = tl.full((SLOTS,), 1, tl.int32) << (at % 32)
    tl.atomic_or(own + at // 32, bit, on & (at >= 0) & (at < columns), sem="relaxed")


@triton.jit
def pack_rows(
    selected, low, high, rows, counts,
    K: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One token: chosen rows to the front in their order, -1 to the rest of the WIDTH slots."""
    token = tl.program_id(0)
    row, on = _chosen(selected, low, high, token, K, SLOTS)
    slot = tl.arange(0, SLOTS)
    upto = tl.cumsum(on.to(tl.int32), 0)
    count = tl.sum(on.to(tl.int32), 0)
    place = tl.where(on, upto - 1, count + slot - upto)
    tl.store(rows + token * WIDTH + place, tl.where(on, row, -1), place < WIDTH)
    tl.store(counts + token, count)


def chosen(selected: Tensor | None, view: Sight, slab: Slab) -> Chosen:
    """Entries that the slab's tokens chose, from `selected` int64 `[T, K]`: numbers within the document, or -1.

    A number counts if it is visible to its token; the others are dropped, wherever in the row they stand.
    Dense form: int32 bits `[tokens, columns / 32]`, bit `c % 32` of word `c / 32` for entry `column + c`. Gather form:
    rows of the entries int32 `[tokens, K']`, K' the next multiple of 128, chosen ones first and in order, then -1;
    beside them how many, int32 `[tokens]`. None without a selection.
    """
    if selected is None or slab.form == "near":
        return None
    here = slice(slab.start, slab.stop)
    own, low, high = selected.contiguous()[here], view.low[here], view.high[here]
    keep = selected.shape[1]
    width = -(-keep // COLUMNS) * COLUMNS
    slots = triton.next_power_of_2(max(width, COLUMNS))
    if slab.form == "dense":
        bits = torch.empty(slab.tokens, slab.columns // 32, dtype=torch.int32, device=selected.device)
        if bits.numel():
            words = triton.next_power_of_2(slab.columns // 32)
            pack_bits[(slab.tokens,)](
                own, low, high, bits, slab.column, slab.columns, K=keep, SLOTS=slots, WORDS=words, num_warps=4
            )
        return bits
    rows = torch.empty(slab.tokens, width, dtype=torch.int32, device=selected.device)
    counts = torch.empty(slab.tokens, dtype=torch.int32, device=selected.device)
    pack_rows[(slab.tokens,)](own, low, high, rows, counts, K=keep, WIDTH=width, SLOTS=slots, num_warps=4)
    return rows, counts
