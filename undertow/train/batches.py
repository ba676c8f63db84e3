"""Packed rows as the model takes them: flat tokens of documents on the device, and the labels of both objectives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from undertow.data.packing import IGNORED, Batch
from undertow.ops.segments import Segments


@dataclass(frozen=True)
class FlatBatch:
    """`ids [T]` of the documents in `segments`, and the next token of each, `labels [T]`, -100 where there is none.

    `mtp_labels [T']` belong to the rows of `Segments.without_last`: the token after the next. `counts` are the numbers
    of real labels of the two, the denominators of their losses.
    """

    ids: Tensor
    labels: Tensor
    mtp_labels: Tensor
    segments: Segments
    counts: tuple[int, int]


def segment_lengths(segment_ids: np.ndarray) -> list[int]:
    """Lengths in tokens of the runs of equal ids in `[B, S]`, row by row; no run goes on in the next row."""
    starts = np.ones(segment_ids.shape, dtype=bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return np.diff(np.flatnonzero(starts), append=segment_ids.size).tolist()


def flat_batch(batch: Batch, device: torch.device | str = "cpu") -> FlatBatch:
    """A packed batch on `device`; boundaries are found on the host."""
    lengths = segment_lengths(batch.segment_ids)
    labels = batch.labels.reshape(-1)
    inner = np.ones(labels.size, dtype=bool)
    inner[np.cumsum(lengths) - 1] = False
    mtp_labels = labels[np.flatnonzero(inner) + 1]
    counts = int((labels != IGNORED).sum()), int((mtp_labels != IGNORED).sum())
    ids, first, second = (torch.from_numpy(x).to(device) for x in (batch.ids.reshape(-1), labels, mtp_labels))
    return FlatBatch(ids, first, second, Segments.from_lengths(lengths, device=device), counts)
