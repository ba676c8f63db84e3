"""Packed rows become documents, and every label keeps its token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from undertow.data.packing import Batch, Packer
from undertow.data.store import TokenStore
from undertow.train.batches import Denominators, count_labels, flat_batch, micro_batches, rows_of, segment_lengths

ROWS = Batch(
    ids=np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]),
    segment_ids=np.array([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]], dtype=np.int32),
    labels=np.array([[2, 3, -100, 5, -100], [-100, 8, 9, 10, -100]]),
)


def test_a_run_ends_at_the_row():
    assert segment_lengths(ROWS.segment_ids) == [3, 2, 1, 4]
    assert segment_lengths(np.zeros((3, 2), dtype=np.int32)) == [2, 2, 2]


def test_micro_batches_are_the_rows_in_order_and_their_denominators_add_up():
    parts = [flat_batch(part) for part in micro_batches(ROWS, 1)]
    assert [part.ids.tolist() for part in parts] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert Denominators.of(parts) == flat_batch(ROWS).counts
    (whole,) = micro_batches(ROWS, None)
    assert np.array_equal(whole.labels, ROWS.labels)
    assert [len(part.ids) for part in micro_batches(Batch(*[np.zeros((5, 3), np.int64)] * 3), 2)] == [2, 2, 1]


def test_labels_of_both_objectives():
    flat = flat_batch(ROWS)
    assert flat.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert flat.segments.new == (3, 2, 1, 4)
    assert flat.labels.tolist() == [2, 3, -100, 5, -100, -100, 8, 9, 10, -100]
    # Rows of the MTP block: all but each document's last token; they predict the token after the next.
    assert flat.mtp_labels.tolist() == [3, -100, -100, 9, 10, -100]
    assert flat.counts == (6, 3, 10, 2)
    assert flat.sequence.tolist() == [0] * 5 + [1] * 5


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3), st.integers(2, 7))
def test_mtp_labels_are_two_tokens_ahead(lengths, rows, length):
    documents = [np.arange(100 * i, 100 * i + n, dtype=np.int32) for i, n in enumerate(lengths)]
    flat = flat_batch(next(Packer(TokenStore.of(documents), rows, length)))
    _, kept = flat.segments.without_last()
    ids = flat.ids[kept]
    real = flat.mtp_labels != -100
    assert len(flat.mtp_labels) == len(kept)
    assert (flat.mtp_labels[real] == ids[real] + 2).all()
    assert flat.counts[1] == int(real.sum()) == sum(max(n - 2, 0) for n in flat.segments.new)


def test_parts_for_ranks_are_rows_in_order():
    rows = Batch(*[np.arange(5)[:, None]] * 3)
    assert [rows_of(rows, place, 3).ids[:, 0].tolist() for place in range(3)] == [[0], [1, 2], [3, 4]]
    assert [rows_of(rows, place, 5).ids[:, 0].tolist() for place in range(5)] == [[0], [1], [2], [3], [4]]
    assert [len(rows_of(rows, place, 8).ids) for place in range(8)] == [0, 1, 0, 1, 1, 0, 1, 1]


def test_labels_are_counted_without_a_device():
    assert count_labels(ROWS) == flat_batch(ROWS).counts == (6, 3, 10, 2)
