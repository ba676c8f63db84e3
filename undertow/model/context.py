"""What every layer of one forward pass shares: documents, token ids, how CSA layers choose, and rotary tables."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from undertow.config.model import ModelConfig
from undertow.model.rotary import Table, table
from undertow.ops.segments import Segments


class Indexing(NamedTuple):
    """How CSA layers treat their indexer in one pass (model card 4.2).

    `dense`: attention reads every visible entry, whatever the indexer would choose. `distil`: compute the indexer's
    distillation loss. `recall`: count how many of the entries that attention weighs most the indexer chooses.
    """

    dense: bool = False
    distil: bool = False
    recall: bool = False


class Context:
    """Per-forward facts. `ids [T]` are the token ids that hash layers route by."""

    def __init__(self, config: ModelConfig, ids: Tensor, segments: Segments, indexing: Indexing | None = None):
        self.config, self.ids, self.segments = config, ids, segments
        self.indexing = indexing or Indexing()
        self._tables: dict[object, Table] = {}

    def rope(self, compressed: bool) -> Table:
        """Rotary table at each token's position, `[T, R]`."""
        if compressed not in self._tables:
            self._tables[compressed] = table(self.config, self.segments.positions, compressed)
        return self._tables[compressed]

    def entry_rope(self, ratio: int) -> Table:
        """Rotary table at the first own token of each group this call completes, `[N, R]`."""
        key = ("entries", ratio)
        if key not in self._tables:
            self._tables[key] = table(self.config, self.segments.entry_positions(ratio), compressed=True)
        return self._tables[key]
