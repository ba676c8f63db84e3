"""Measuring what a forward pass keeps and what a step holds: given documents, saved tensors, live storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from undertow.config.model import ModelConfig
from undertow.data.packing import Batch
from undertow.train.batches import FlatBatch, flat_batch


def packed(config: ModelConfig, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> FlatBatch:
    """Random tokens in rows that consist of documents of the given lengths, every row as long as the others."""
    rng = np.random.default_rng(0)
    shape = len(rows), sum(rows[0])
    ids, labels = (rng.integers(0, config.vocab_size, shape) for _ in range(2))
    documents = np.stack([np.repeat(np.arange(len(row)), row) for row in rows])
    return flat_batch(Batch(ids, documents, labels), device)


def saved_by_hooks(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes of the distinct storages that `forward` saves for backward, parameters and buffers excluded."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in own:
            storages.setdefault(storage.data_ptr(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(storage.nbytes() for storage in storages.values())
    del result
    return total


class LiveBytes(TorchDispatchMode):
    """While active, `live` are the bytes of all storages made by operators (and of `known` tensors) that still exist;
    `peak` is the most there were. Temporaries within one operator of torch are not seen."""

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.live = self.peak = 0
        self._held: set[int] = set()
        for tensor in known:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._held:
            self._held.add(key)
            self.live += size
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak = max(self.peak, self.live)
        return result
