"""What earlier tokens leave behind for later ones: per layer, rows of each kind and the open windows of HCA.

`LayerCache` is the protocol a layer sees: `append` rows and get back all that are held, `load` and `store` a small
state. `NoCache` serves training; `ContiguousCache` keeps every kind as one tensor, document after document, and never
writes in place, so that a snapshot is a copy of references and a call that fails midway leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.ops.reference.compress import Running
from undertow.ops.segments import RowKind, RowLayout, Rows, Segments


class LayerCache(Protocol):
    """One layer's side of a cache."""

    def append(self, name: str, rows: Tensor, layout: RowLayout) -> Rows:
        """Add this call's rows `[N, ...]` of one kind; returns the rows held from before together with them."""
        ...

    def load(self, name: str) -> Running | None:
        """The state stored under `name` by the last call, one row a document, or None."""
        ...

    def store(self, name: str, state: Callable[[], Running]) -> None:
        """Keep a state for the next call; made only if it is kept."""
        ...


class Cache(Protocol):
    """A cache of several documents: what the model needs of contiguous or paged storage."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document that the cache holds."""
        ...

    def layer(self, index: int) -> LayerCache:
        """The view of one layer; the MTP block follows the main stack."""
        ...

    def begin(self, segments: Segments, block: str) -> None:
        """Open a call of `block` ("trunk" or "mtp"), forgetting what a call that failed midway left behind.

        Raises `InputError` if `segments` do not continue the documents that are held.
        """
        ...

    def advance(self, segments: Segments, block: str) -> None:
        """Close the call: keep what the layers of `block` appended, and count its tokens."""
        ...


class NoCache:
    """Nothing is kept: each call sees whole documents."""

    def append(self, name: str, rows: Tensor, layout: RowLayout) -> Rows:
        return Rows(rows, layout)

    def load(self, name: str) -> Running | None:
        return None

    def store(self, name: str, state: Callable[[], Running]) -> None:
        return None


@dataclass
class _Held:
    kind: RowKind
    rows: Tensor


class _ContiguousLayer:
    """Rows and states as the last complete call left them, and those of the call under way."""

    def __init__(self) -> None:
        self.rows: dict[str, _Held] = {}
        self.states: dict[str, Running] = {}
        self._fresh_rows: dict[str, _Held] = {}
        self._fresh_states: dict[str, Running] = {}

    def append(self, name: str, rows: Tensor, layout: RowLayout) -> Rows:
        held = self.rows.get(name)
        both = Rows(rows if held is None else torch.cat([held.rows, rows]), layout)
        self._fresh_rows[name] = _Held(layout.kind, both.data[layout.retained].detach())
        return both

    def load(self, name: str) -> Running | None:
        return self.states.get(name)

    def store(self, name: str, state: Callable[[], Running]) -> None:
        self._fresh_states[name] = state()

    def forget(self) -> None:
        """Drop what an unfinished call appended."""
        self._fresh_rows, self._fresh_states = {}, {}

    def commit(self) -> None:
        """Make this call's rows and states the held ones."""
        self.rows |= self._fresh_rows
        self.states |= self._fresh_states
        self.forget()

    def copy(self) -> _ContiguousLayer:
        other = _ContiguousLayer()
        other.rows, other.states = dict(self.rows), dict(self.states)
        return other

    def select(self, documents: Sequence[int], lengths: Sequence[int]) -> None:
        for name, held in self.rows.items():
            counts = [held.kind.held(n) for n in lengths]
            parts = held.rows.split(counts)
            self.rows[name] = _Held(held.kind, torch.cat([parts[d] for d in documents]))
        index = torch.tensor(list(documents), dtype=torch.int64)
        self.states = {
            name: Running(*(part[index.to(part.device)] for part in state)) for name, state in self.states.items()
        }


class ContiguousCache:
    """Cache of a fixed number of documents, every kind contiguous; `lengths` tokens of each are held.

    The MTP block runs one token behind the trunk and counts its own `draft_lengths`.
    """

    def __init__(self, layers: int, sequences: int, mtp: int = 0):
        if sequences < 1:
            raise InputError(f"a cache for {sequences} sequences: at least 1 is needed")
        self._layers = [_ContiguousLayer() for _ in range(layers + mtp)]
        self._lengths = {"trunk": (0,) * sequences, "mtp": (0,) * sequences}
        self._mtp_layer = layers

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._lengths["trunk"]

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Tokens of each document that the MTP block has seen."""
        return self._lengths["mtp"]

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def _block(self, block: str) -> list[_ContiguousLayer]:
        return self._layers[: self._mtp_layer] if block == "trunk" else self._layers[self._mtp_layer :]

    def begin(self, segments: Segments, block: str) -> None:
        if segments.past != self._lengths[block]:
            raise InputError(
                f"segments continue documents of {list(segments.past)} tokens; the cache holds "
                f"{list(self._lengths[block])}: build them with past=cache.lengths (MTP block: cache.draft_lengths)"
            )
        for layer in self._block(block):
            layer.forget()

    def advance(self, segments: Segments, block: str) -> None:
        for layer in self._block(block):
            layer.commit()
        self._lengths[block] = tuple(p + n for p, n in zip(segments.past, segments.new, strict=True))

    def snapshot(self) -> object:
        """The present state, to `restore` later; costs no copy of tensors."""
        return [layer.copy() for layer in self._layers], dict(self._lengths)

    def restore(self, snapshot: object) -> None:
        """Go back to a state that `snapshot` returned; it may be restored again."""
        layers, lengths = snapshot  # type: ignore[misc]
        self._layers, self._lengths = [layer.copy() for layer in layers], dict(lengths)

    def select(self, documents: Sequence[int]) -> None:
        """Keep only these documents, in this order (one may repeat). Raises `InputError` for none, or one not held."""
        held = len(self.lengths)
        documents = [int(d) for d in documents]
        if not documents or not all(0 <= d < held for d in documents):
            raise InputError(
                f"select {documents}: the cache holds documents 0 to {held - 1}, and one at least must stay"
            )
        for index, layer in enumerate(self._layers):
            layer.select(documents, self._lengths["trunk" if index < self._mtp_layer else "mtp"])
        self._lengths = {block: tuple(held[d] for d in documents) for block, held in self._lengths.items()}
