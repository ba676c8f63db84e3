"""Documents as token ids, packed into rows without losing or repeating a token, from a cursor that resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any

import numpy as np

from undertow.config.errors import InputError
from undertow.data.corpus import Document
from undertow.data.tokenizer import Tokenizer

IGNORED = -100
_CHUNK = 64  # documents encoded at once: the encoder's own records take about a hundred bytes a token


@dataclass(frozen=True)
class Batch:
    """Packed rows [B, S]: `ids` int64, `segment_ids` int32, `labels` int64.

    A segment is a run of one document's tokens inside one row, numbered 0, 1, 2 ... in each row; attention stays inside
    it. A document that does not end in its row goes on in the next one as a new segment, without its earlier tokens.
    A label is the next token of the same segment, or -100 at the segment's last token, which has none.
    """

    ids: np.ndarray
    segment_ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Cursor:
    """Where the next token is read: `offset` tokens into the `document`-th document of the `epoch`'s own order.

    `fingerprint` names the documents and the shuffling seed it belongs to. Row length and batch size are no part of it:
    they may change at a resumption.
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
    """Training batches without end: an iterator of `Batch` with `rows` full rows of `sequence_length` tokens.

    Each epoch reads all documents in an order of its own, fixed by `seed`. Rows are cut from one stream, so the end of
    an epoch shares its batch with the start of the next. `documents` are token ids as from `encode_documents`. Starting
    from an earlier `cursor` gives the same batches as going on; one of other data or another seed is an `InputError`.
    """

    def __init__(
        self,
        documents: Sequence[np.ndarray],
        rows: int,
        sequence_length: int,
        seed: int = 0,
        cursor: Cursor | None = None,
    ) -> None:
        _check(documents, rows, sequence_length)
        self._documents, self._rows, self._length, self._seed = documents, rows, sequence_length, seed
        fingerprint = _fingerprint(documents, seed)
        self._cursor = cursor or Cursor(0, 0, 0, fingerprint)
        if self._cursor.fingerprint != fingerprint:
            raise InputError(
                f"data cursor of fingerprint {self._cursor.fingerprint} does not belong to these documents and seed "
                f"({fingerprint}): resume with the same corpus, tokenizer and seed, or start without a cursor"
            )
        self._order = self._shuffled(self._cursor.epoch)
        _check_range(self._cursor, documents, self._order)

    @property
    def cursor(self) -> Cursor:
        """The position after the last batch given out: save it with the model that has learned from that batch."""
        return self._cursor

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return _batch([self._row() for _ in range(self._rows)])

    def _row(self) -> list[np.ndarray]:
        segments: list[np.ndarray] = []
        room = self._length
        while room:
            at = self._cursor
            document = self._documents[self._order[at.document]]
            segments.append(document[at.offset : at.offset + room])
            room -= len(segments[-1])
            self._advance(len(segments[-1]), len(document))
        return segments

    def _advance(self, taken: int, size: int) -> None:
        epoch, document, offset = self._cursor.epoch, self._cursor.document, self._cursor.offset + taken
        if offset == size:
            document, offset = document + 1, 0
        if document == len(self._documents):
            epoch, document = epoch + 1, 0
            self._order = self._shuffled(epoch)
        self._cursor = Cursor(epoch, document, offset, self._cursor.fingerprint)

    def _shuffled(self, epoch: int) -> list[int]:
        # Sorting by a hash keeps the order through every release of Python and NumPy; their shuffles promise less.
        def key(index: int) -> bytes:
            return blake2b(f"{self._seed}/{epoch}/{index}".encode(), digest_size=16).digest()

        return sorted(range(len(self._documents)), key=key)


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Each document's ids [T] int32, the begin token first and the end token last."""
    encoded: list[np.ndarray] = []
    for start in range(0, len(documents), _CHUNK):
        texts = [document.text for document in documents[start : start + _CHUNK]]
        for ids in tokenizer.encode_all(texts):
            encoded.append(np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], dtype=np.int32))
    return encoded


def validation_batches(documents: Sequence[np.ndarray], rows: int, sequence_length: int) -> Iterator[Batch]:
    """Every token of `documents` once, in order and without padding; the same batches each time.

    After the full batches may come one with fewer rows, and then one with a single row shorter than `sequence_length`.
    """
    _check(documents, rows, sequence_length)
    stream = np.concatenate(documents)
    owner = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    cut = [_segments(stream[at : at + sequence_length], owner[at : at + sequence_length])
           for at in range(0, len(stream), sequence_length)]  # fmt: skip
    whole = len(stream) // sequence_length
    for start in range(0, whole, rows):
        yield _batch(cut[start : min(start + rows, whole)])
    if whole < len(cut):
        yield _batch(cut[whole:])


def _segments(ids: np.ndarray, owner: np.ndarray) -> list[np.ndarray]:
    return np.split(ids, np.flatnonzero(np.diff(owner)) + 1)


def _batch(rows: list[list[np.ndarray]]) -> Batch:
    ids = np.stack([np.concatenate(row) for row in rows]).astype(np.int64)
    numbers = [np.repeat(np.arange(len(row), dtype=np.int32), [len(part) for part in row]) for row in rows]
    segment_ids = np.stack(numbers)
    labels = np.full_like(ids, IGNORED)
    inside = segment_ids[:, :-1] == segment_ids[:, 1:]
    labels[:, :-1][inside] = ids[:, 1:][inside]
    return Batch(ids, segment_ids, labels)


def _fingerprint(documents: Sequence[np.ndarray], seed: int) -> str:
    digest = blake2b(f"{seed}".encode(), digest_size=8)
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document.astype("<i4").tobytes())
    return digest.hexdigest()


def _check(documents: Sequence[np.ndarray], rows: int, sequence_length: int) -> None:
    if not documents or any(len(document) == 0 for document in documents):
        raise InputError("packing needs at least one document, and at least one token in each")
    if rows < 1 or sequence_length < 2:
        raise InputError(f"rows {rows} must be at least 1 and sequence_length {sequence_length} at least 2")


def _check_range(cursor: Cursor, documents: Sequence[np.ndarray], order: list[int]) -> None:
    if not (
        cursor.epoch >= 0
        and 0 <= cursor.document < len(documents)
        and 0 <= cursor.offset < len(documents[order[cursor.document]])
    ):
        raise InputError(f"data cursor {cursor.to_dict()} points outside the {len(documents)} documents")
