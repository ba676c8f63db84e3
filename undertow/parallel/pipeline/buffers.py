"""Memory of what stages receive: held from the receipt to the end of the backward pass, not for all of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage


class LeanStage(PipelineStage):
    """A stage of torch's, whose buffers for all microbatches of a step have memory only while they are in use."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._held: dict[int, list[Tensor]] = defaultdict(list)
        self._lean = False

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._hold(fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._hold(bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        if not self._lean:
            self._lean = True
            held = {buffer.data_ptr() for each in self._held.values() for buffer in each}
            for buffer in self.buffers():
                if buffer.data_ptr() not in held:
                    buffer.untyped_storage().resize_(0)
        return super().forward_one_chunk(fwd_chunk_id, *args, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **named: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **named)
        if full_backward:
            self._release(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **named: Any) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **named)
        self._release(bwd_chunk_id)

    def buffers(self) -> Iterator[Tensor]:
        """What streams and gradients of other ranks are received in."""
        for step, every in ((-1, self.args_recv_info), (1, self.grad_recv_info)):
            # What stages of one rank hand each other takes the place of a buffer.
            if self.stage_index_to_group_rank.get(self.stage_index + step, self.group_rank) != self.group_rank:
                yield from (cast(Tensor, info.buffer) for each in every.values() for info in each)

    def _hold(self, microbatch: int, receipts: list[dist.P2POp]) -> list[dist.P2POp]:
        for receipt in receipts:
            storage = receipt.tensor.untyped_storage()
            storage.resize_(receipt.tensor.numel() * receipt.tensor.element_size())
            self._held[microbatch].append(receipt.tensor)
        return receipts

    def _release(self, microbatch: int) -> None:
        for buffer in self._held.pop(microbatch, ()):
            buffer.untyped_storage().resize_(0)
