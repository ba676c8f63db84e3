"""What every layer of one forward pass shares: the documents, token ids and rotary tables, each made once."""

from __future__ import annotations

from torch import Tensor

from undertow.config.model import ModelConfig
from undertow.model.rotary import Table, table
from undertow.ops.segments import Segments


class Context:
    """Per-forward facts. `ids [T]` are the token ids that hash layers route by."""

    def __init__(self, config: ModelConfig, ids: Tensor, segments: Segments):
        self.config, self.ids, self.segments = config, ids, segments
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
