"""How attention and the indexer cut their queries: blocks of consecutive positions, a bounded number of them at a
time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from undertow.ops.reference.precision import wide
from undertow.ops.segments import QueryBlocks, Segments

# Shapes of the batch-invariant mode: fixed, and anchored to absolute positions and entry numbers.
ANCHORED_BLOCK = 32
ENTRY_CHUNK = 64

# Score elements that exist at once outside that mode (float32: 32 MiB).
_BUDGET = 1 << 23


def block_size(segments: Segments) -> int:
    """Queries per block when bits may depend on the call: 64, or fewer where every document adds fewer tokens."""
    longest = max(segments.new, default=1)
    return min(64, 1 << max(longest - 1, 0).bit_length())


def entry_step(blocks: QueryBlocks, heads: int, visible: int, invariant: bool) -> int:
    """Entries that one block meets at a time: all that are visible if their scores fit the budget."""
    return ENTRY_CHUNK if invariant else max(1, min(visible, _BUDGET // (blocks.size * heads)))


def groups_of_blocks(blocks: QueryBlocks, heads: int, keys: Callable[[int], int], invariant: bool) -> Iterator[slice]:
    """Consecutive blocks whose scores fit the budget; one block at a time when `invariant`. `keys(last position)`."""
    start = 0
    while start < blocks.count:
        end, widest = start, 1
        while end < blocks.count and (end == start or not invariant):
            widest = max(widest, keys(blocks.last[end]))
            if end > start and (end + 1 - start) * blocks.size * heads * widest > _BUDGET:
                break
            end += 1
        yield slice(start, end)
        start = end


def gather_queries(x: Tensor, blocks: QueryBlocks, group: slice) -> Tensor:
    """Rows of `x [T, ...]` as `[G, size, ...]` in the accumulation type; absent slots are zero."""
    query = blocks.query[group]
    if blocks.full:
        return wide(x[query.flatten()].view(*query.shape, *x.shape[1:]))
    rows = wide(x[query.clamp(min=0).flatten()].view(*query.shape, *x.shape[1:]))
    return rows.masked_fill((query < 0).view(*query.shape, *(1,) * (x.dim() - 1)), 0.0)
