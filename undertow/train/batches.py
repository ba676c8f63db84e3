"""Packed rows as the model takes them: flat tokens of documents on the device, and the labels of both objectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from undertow.data.packing import IGNORED, Batch
from undertow.ops.segments import Segments, moved


class Denominators(NamedTuple):
    """What the losses of a batch are divided by: labels of the next token, labels of the one after, tokens, rows.

    `tokens` counts every token of the batch, learned or not; `rows` are its sequences.
    """

    lm: int
    mtp: int
    tokens: int
    rows: int

    @staticmethod
    def of(batches: Iterable[FlatBatch]) -> Denominators:
        """Those of batches together."""
        return Denominators(*(sum(each) for each in zip(*(batch.counts for batch in batches), strict=True)))


@dataclass(frozen=True)
class FlatBatch:
    """`ids [T]` of the documents in `segments`, and the next token of each, `labels [T]`, -100 where there is none.

    `mtp_labels [T']` belong to the rows of `Segments.without_last`: the token after the next. `sequence [T]` is the row
    of the batch that each token stands in. `counts` are this batch's own denominators.
    """

    ids: Tensor
    labels: Tensor
    mtp_labels: Tensor
    sequence: Tensor
    segments: Segments
    counts: Denominators


def segment_lengths(segment_ids: np.ndarray) -> list[int]:
    """Lengths in tokens of the runs of equal ids in `[B, S]`, row by row; no run goes on in the next row."""
    starts = np.ones(segment_ids.shape, dtype=bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return np.diff(np.flatnonzero(starts), append=segment_ids.size).tolist()


def count_labels(batch: Batch) -> Denominators:
    """The denominators of a packed batch, without moving it to a device."""
    _, labels, mtp_labels = _labels(batch)
    return _counts(batch, labels, mtp_labels)


def _labels(batch: Batch) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Lengths of the documents, labels of the next token, and of the one after."""
    lengths = segment_lengths(batch.segment_ids)
    labels = batch.labels.reshape(-1)
    inner = np.ones(labels.size, dtype=bool)
    inner[np.cumsum(lengths) - 1] = False
    return lengths, labels, labels[np.flatnonzero(inner) + 1]


def _counts(batch: Batch, labels: np.ndarray, mtp_labels: np.ndarray) -> Denominators:
    learned, drafted = (int((each != IGNORED).sum()) for each in (labels, mtp_labels))
    return Denominators(learned, drafted, batch.ids.size, len(batch.ids))


def flat_batch(batch: Batch, device: torch.device | str = "cpu") -> FlatBatch:
    """A packed batch on `device`; boundaries are found on the host."""
    lengths, labels, mtp_labels = _labels(batch)
    rows, length = batch.ids.shape
    counts = _counts(batch, labels, mtp_labels)
    sequence = np.repeat(np.arange(rows), length)
    ids, first, second, owner = (
        moved(torch.from_numpy(x), torch.device(device)) for x in (batch.ids.reshape(-1), labels, mtp_labels, sequence)
    )
    return FlatBatch(ids, first, second, owner, Segments.from_lengths(lengths, device=device), counts)


def rows_of(batch: Batch, place: int, parts: int) -> Batch:
    """The `place`-th of `parts` parts of a batch, as equal as its rows allow, in their order; it may have none."""
    first, end = (len(batch.ids) * at // parts for at in (place, place + 1))
    return Batch(batch.ids[first:end], batch.segment_ids[first:end], batch.labels[first:end])


def micro_batches(batch: Batch, rows: int | None) -> Iterator[Batch]:
    """The batch in parts of `rows` rows, the last one with what is left; None leaves it whole."""
    for start in range(0, len(batch.ids), rows or len(batch.ids)):
        part = slice(start, start + (rows or len(batch.ids)))
        yield Batch(batch.ids[part], batch.segment_ids[part], batch.labels[part])
