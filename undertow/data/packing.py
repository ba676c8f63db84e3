"""Documents packed into rows without losing or repeating a token, from a cursor that resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any

import numpy as np

from undertow.config.errors import InputError
from undertow.data.order import epoch_order
from undertow.data.store import TokenStore

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Packed rows [B, S]: `ids` int64, `segment_ids` int32, `labels` int64.

    A segment is a run of one document's tokens inside one row, numbered 0, 1, 2 ... in each row; attention stays inside
    it. A document that does not end in its row goes on in the next one as a new segment, without its earlier tokens.
    A label is the next token of the same segment, or -100 where there is none or it is not to be learned.
    """

    ids: np.ndarray
    segment_ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Cursor:
    """Where the next token is read: `offset` tokens into the `document`-th document of the `epoch`'s own order.

    `fingerprint` names the documents and the shuffling seed it belongs to. Row length and batch size are no part of it:
    they may change from step to step and at a resumption.
    """

    epoch: int
    document: int
    offset: int
    fingerprint: str

    def to_dict(self) -> dict[str, int | str]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Cursor:
        """The cursor of `to_dict`. Raises `InputError` for anything else."""
        kinds = {field.name: str if field.name == "fingerprint" else int for field in fields(cls)}
        if set(state) != set(kinds) or any(type(state[name]) is not kind for name, kind in kinds.items()):
            raise InputError(f"data cursor {state} must hold epoch, document, offset (integers) and fingerprint (text)")
        return cls(**state)


class Packer:
    """Training batches without end: `next` gives `rows` full rows of `sequence_length` tokens, `take` any other shape.

    Each epoch reads all documents in an order of its own, fixed by `seed`. Rows are cut from one stream, so the end of
    an epoch shares its batch with the start of the next. Starting from an earlier `cursor` gives the same batches as
    going on; one of other data or another seed is an `InputError`.
    """

    def __init__(
        self, store: TokenStore, rows: int, sequence_length: int, seed: int = 0, cursor: Cursor | None = None
    ) -> None:
        _check(rows, sequence_length)
        self._store, self._rows, self._length, self._seed = store, rows, sequence_length, seed
        fingerprint = blake2b(f"{store.content}\n{seed}".encode(), digest_size=8).hexdigest()
        self._cursor = cursor or Cursor(0, 0, 0, fingerprint)
        if self._cursor.fingerprint != fingerprint:
            raise InputError(
                f"data cursor of fingerprint {self._cursor.fingerprint} does not belong to these documents and seed "
                f"({fingerprint}): resume with the same data and seed, or begin a new run with out=DIR"
            )
        if not (0 <= self._cursor.epoch < 2**63 and 0 <= self._cursor.document < len(store)):
            raise _outside(self._cursor, store)
        self._order = epoch_order(len(store), seed, self._cursor.epoch)
        if not 0 <= self._cursor.offset < store.lengths[self._order[self._cursor.document]]:
            raise _outside(self._cursor, store)

    @property
    def cursor(self) -> Cursor:
        """The position after the last batch given out: save it with the model that has learned from that batch."""
        return self._cursor

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.take(self._rows, self._length)

    def take(self, rows: int, sequence_length: int) -> Batch:
        """The next `rows` rows of `sequence_length` tokens, whatever shape the batches before had."""
        _check(rows, sequence_length)
        stream = _Stream(rows * sequence_length)
        epoch, document, offset = self._cursor.epoch, self._cursor.document, self._cursor.offset
        while stream.room:
            number = int(self._order[document])
            offset += stream.add(self._store, number, offset)
            if offset == self._store.lengths[number]:
                document, offset = document + 1, 0
            if document == len(self._store):
                epoch, document = epoch + 1, 0
                self._order = epoch_order(len(self._store), self._seed, epoch)
        self._cursor = Cursor(epoch, document, offset, self._cursor.fingerprint)
        return stream.batch(rows, sequence_length)


def validation_batches(store: TokenStore, rows: int, sequence_length: int) -> Iterator[Batch]:
    """Every token of `store` once, in order and without padding; the same batches each time.

    After the full batches may come one with fewer rows, and then one with a single row shorter than `sequence_length`.
    """
    _check(rows, sequence_length)
    left, document, offset = store.tokens, 0, 0
    while left:
        length = min(sequence_length, left)
        height = min(rows, left // length)
        stream = _Stream(height * length)
        left -= stream.room
        while stream.room:
            offset += stream.add(store, document, offset)
            if offset == store.lengths[document]:
                document, offset = document + 1, 0
        yield stream.batch(height, length)


class _Stream:
    """Room for the tokens of one batch, filled document by document and then cut into rows."""

    def __init__(self, tokens: int) -> None:
        self._ids = np.empty(tokens, dtype=np.int64)
        self._learned = np.ones(tokens, dtype=bool)
        self._begins = np.zeros(tokens, dtype=bool)
        self.room = tokens

    def add(self, store: TokenStore, document: int, offset: int) -> int:
        """Take tokens of a document from `offset` while it and the room last; return how many."""
        at = len(self._ids) - self.room
        ids, learned = store.read(document, offset, offset + self.room)
        self._ids[at : at + len(ids)] = ids
        if learned is not None:
            self._learned[at : at + len(ids)] = learned
        self._begins[at] = True
        self.room -= len(ids)
        return len(ids)

    def batch(self, rows: int, length: int) -> Batch:
        ids, learned, begins = (flat.reshape(rows, length) for flat in (self._ids, self._learned, self._begins))
        begins[:, 0] = False  # each row counts from 0
        labels = np.full_like(ids, IGNORED)
        inside = ~begins[:, 1:] & learned[:, 1:]
        labels[:, :-1][inside] = ids[:, 1:][inside]
        return Batch(ids, np.cumsum(begins, axis=1, dtype=np.int32), labels)


def _check(rows: int, sequence_length: int) -> None:
    if rows < 1 or sequence_length < 2:
        raise InputError(f"rows {rows} must be at least 1 and sequence_length {sequence_length} at least 2")


def _outside(cursor: Cursor, store: TokenStore) -> InputError:
    return InputError(f"data cursor {cursor.to_dict()} points outside the {len(store)} documents")
