"""What a rank holds of a tensor that lies in parts over ranks."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def held(tensor: Tensor) -> Tensor:
    """The part on this rank, a plain tensor that may have no rows; all of a tensor that does not lie in parts."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of(rows: int, ranks: int) -> list[range]:
    """Which of so many rows each rank holds, as FSDP2 deals them out: the last ranks may have fewer, or none."""
    each = -(-rows // ranks)
    return [range(min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(ranks)]
