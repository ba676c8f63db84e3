"""Packed rows become documents, and every label keeps its token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from undertow.data.packing import Batch, Packer
from undertow.train.batches import flat_batch, segment_lengths

ROWS = Batch(
    ids=np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]),
    segment_ids=np.array([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]], dtype=np.int32),
    labels=np.array([[2, 3, -100, 5, -100], [-100, 8, 9, 10, -100]]),
)


def test_a_run_ends_at_the_row():
    assert segment_lengths(ROWS.segment_ids) == [3, 2, 1, 4]
    assert segment_lengths(np.zeros((3, 2), dtype=np.int32)) == [2, 2, 2]


def test_labels_of_both_objectives():
    flat = flat_batch(ROWS)
    assert flat.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert flat.segments.new == (3, 2, 1, 4)
    assert flat.labels.tolist() == [2, 3, -100, 5, -100, -100, 8, 9, 10, -100]
    # Rows of the MTP block: all but each document's last token; they predict the token after the next.
    assert flat.mtp_labels.tolist() == [3, -100, -100, 9, 10, -100]
    assert flat.counts == (6, 3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3), st.integers(2, 7))
def test_mtp_labels_are_two_tokens_ahead(lengths, rows, length):
    documents = [np.arange(100 * i, 100 * i + n, dtype=np.int32) for i, n in enumerate(lengths)]
    flat = flat_batch(next(Packer(documents, rows, length)))
    _, kept = flat.segments.without_last()
    ids = flat.ids[kept]
    real = flat.mtp_labels != -100
    assert len(flat.mtp_labels) == len(kept)
    assert (flat.mtp_labels[real] == ids[real] + 2).all()
    assert flat.counts[1] == int(real.sum()) == sum(max(n - 2, 0) for n in flat.segments.new)
