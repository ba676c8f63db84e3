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
def _chosen(selected, low, high, token, slot, K: tl.constexpr):
    """Flat rows int32 that a token selected in these slots, -1 where none or one that it does not see."""
    number = tl.load(selected + token.to(tl.int64) * K + slot, (slot >= 0) & (slot < K), other=-1)
    first = tl.load(low + token)
    # Compared before it is cut to int32.
    on = (number >= 0) & (number < tl.load(high + token) - first)
    return tl.where(on, first + number.to(tl.int32), -1)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def pack_bits(
    selected, low, high, bits, column, columns,
    K: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The bits of one token of the slab, WORDS words at a time; pointers begin at the slab."""
    token = tl.program_id(0)
    row = _chosen(selected, low, high, token, tl.arange(0, PADDED), K)
    at = tl.where(row >= 0, row - column, -1)
    bit = tl.full((PADDED,), 1, tl.int32) << (at % 32)
    of = tl.where(at >= 0, at // 32, -1)
    own = bits + token.to(tl.int64) * (columns // 32)
    for w in range(0, columns // 32, WORDS):
        word = w + tl.arange(0, WORDS)
        found = tl.reduce(tl.where(of[:, None] == word[None, :], bit[:, None], 0), 0, _either)
        tl.store(own + word, found, word < columns // 32)


PART = tl.constexpr(8)
"""Rows that are looked for among all at a time."""


@triton.jit
def pack_rows(
    selected, low, high, rows, counts,
    K: tl.constexpr, SLOTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One token: chosen rows to the front in their order, each once, the first one inverted (~) to the other slots."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, PADDED)
    row = _chosen(selected, low, high, token, slot, K)
    on = row >= 0
    # Where every visible row follows a lesser one, as the indexer gives them, none is there twice.
    before = _chosen(selected, low, high, token, slot - 1, K)
    loose = on & (slot > 0) & ((before < 0) | (before >= row))
    if tl.max(loose.to(tl.int32), 0) > 0:
        for k in range(0, K, PART):
            j = k + tl.arange(0, PART)
            earlier = _chosen(selected, low, high, token, j, K)
            again = (row[:, None] == earlier[None, :]) & (slot[:, None] > j[None, :])
            on = on & (tl.max(again.to(tl.int32), 1) == 0)
    upto = tl.cumsum(on.to(tl.int32), 0)
    count = tl.sum(on.to(tl.int32), 0)
    place = tl.where(on, upto - 1, count + slot - upto)
    first = tl.sum(tl.where(on & (upto == 1), row, 0), 0)
    tl.store(rows + token * SLOTS + place, tl.where(on, row, ~first), place < SLOTS)
    tl.store(counts + token, count)


@triton.jit
def row_read(picked):
    """The row that a slot reads: in an empty one the token's first, for 0 times what others hold may be NaN."""
    return picked ^ (picked >> 31)


def chosen(selected: Tensor | None, view: Sight, slab: Slab) -> Chosen:
    """Entries that the slab's tokens chose, from `selected` int64 `[T, K]`: numbers within the document, or -1.

    A number counts, once, if it is visible to its token; the others are dropped, wherever in the row they stand.
    Dense form: int32 bits `[tokens, columns / 32]`, bit `c % 32` of word `c / 32` for entry `column + c`. Gather form:
    rows of the entries int32 `[tokens, K']`, K' the next multiple of 128 from 128 on, chosen ones first and in order,
    then negative numbers (see `row_read`); beside them how many, int32 `[tokens]`. None without a selection.
    """
    if selected is None or slab.form == "near":
        return None
    here = slice(slab.start, slab.stop)
    own, low, high = selected.contiguous()[here], view.low[here], view.high[here]
    if slab.form == "gather":
        return chosen_rows(own, low, high)
    keep = selected.shape[1]
    bits = torch.empty(slab.tokens, slab.columns // 32, dtype=torch.int32, device=selected.device)
    if bits.numel():
        padded = triton.next_power_of_2(_slots(keep))
        pack_bits[(slab.tokens,)](
            own, low, high, bits, slab.column, slab.columns,
            K=keep, PADDED=padded, WORDS=8, num_warps=max(padded // 128, 4),
        )  # fmt: skip
    return bits


def chosen_rows(selected: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """As `chosen` in the gather form, for tokens whose `selected [tokens, K]`, contiguous, and bounds these are."""
    tokens, keep = selected.shape
    slots = _slots(keep)
    rows = torch.empty(tokens, slots, dtype=torch.int32, device=selected.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=selected.device)
    pack_rows[(tokens,)](
        selected, low, high, rows, counts,
        K=keep, SLOTS=slots, PADDED=triton.next_power_of_2(slots), num_warps=4,
    )  # fmt: skip
    return rows, counts


def _slots(keep: int) -> int:
    """Slots of a token that selects `keep` entries: whole tiles of them, one even if it selects none."""
    return max(-(-keep // COLUMNS), 1) * COLUMNS
