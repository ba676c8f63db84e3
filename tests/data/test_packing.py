import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.config.errors import InputError
from undertow.data.corpus import Document
from undertow.data.packing import IGNORED, Batch, Cursor, Packer, encode_documents, validation_batches
from undertow.data.tokenizer import Tokenizer

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=8)
shapes = st.tuples(st.integers(1, 3), st.integers(2, 12))


def numbered(lengths: list[int]) -> list[np.ndarray]:
    """Documents in which every token is unique: 100 times the document's number, plus its place."""
    return [np.arange(length, dtype=np.int32) + 100 * number for number, length in enumerate(lengths, 1)]


def check(batch: Batch) -> None:
    """Segments are runs of one document counted from 0, and labels are the next token inside them."""
    for ids, segments, labels in zip(batch.ids, batch.segment_ids, batch.labels, strict=True):
        assert segments[0] == 0 and set(np.diff(segments)) <= {0, 1}
        for place in range(len(ids)):
            if place + 1 < len(ids) and segments[place] == segments[place + 1]:
                assert ids[place + 1] == ids[place] + 1 == labels[place]
            else:
                assert labels[place] == IGNORED
            if place and segments[place] != segments[place - 1]:
                assert ids[place] % 100 == 0  # inside a row a segment starts at a document's start
    assert (batch.ids.dtype, batch.segment_ids.dtype, batch.labels.dtype) == (np.int64, np.int32, np.int64)


def same(left: Batch, right: Batch) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in ("ids", "segment_ids", "labels"))


def test_rows_continue_a_document_as_a_new_segment():
    batch, rest = validation_batches([np.arange(5), np.arange(100, 103)], rows=2, sequence_length=3)
    assert batch.ids.tolist() == [[0, 1, 2], [3, 4, 100]]
    assert batch.segment_ids.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert batch.labels.tolist() == [[1, 2, IGNORED], [4, IGNORED, IGNORED]]
    assert rest.ids.tolist() == [[101, 102]] and rest.labels.tolist() == [[102, IGNORED]]


@settings(deadline=None)
@given(lengths=lengths, shape=shapes, seed=st.integers(0, 5))
def test_every_epoch_gives_every_token_once(lengths: list[int], shape: tuple[int, int], seed: int):
    documents = numbered(lengths)
    total, (rows, length) = sum(lengths), shape
    batches = list(islice(Packer(documents, rows, length, seed), -(-3 * total // (rows * length))))
    for batch in batches:
        check(batch)
    stream = np.concatenate([batch.ids.ravel() for batch in batches])
    for epoch in range(3):
        tokens = stream[epoch * total : (epoch + 1) * total]
        assert Counter(tokens.tolist()) == Counter(np.concatenate(documents).tolist())


@settings(deadline=None)
@given(lengths=lengths, shape=shapes)
def test_validation_gives_every_token_once_in_order(lengths: list[int], shape: tuple[int, int]):
    documents, (rows, length) = numbered(lengths), shape
    batches = list(validation_batches(documents, rows, length))
    for batch in batches:
        check(batch)
    assert np.concatenate([batch.ids.ravel() for batch in batches]).tolist() == np.concatenate(documents).tolist()
    full = [batch for batch in batches if batch.ids.shape[1] == length]
    assert all(batch.ids.shape == (rows, length) for batch in full[:-1])
    assert len(batches) - len(full) == (1 if sum(lengths) % length else 0)


@settings(deadline=None, max_examples=40)
@given(lengths=lengths, shape=shapes, seed=st.integers(0, 5))
def test_resuming_at_any_batch_gives_the_same_batches(lengths: list[int], shape: tuple[int, int], seed: int):
    documents, (rows, length) = numbered(lengths), shape
    packer = Packer(documents, rows, length, seed)
    cursors, batches = [packer.cursor], []
    for _ in range(2 * sum(lengths) // (rows * length) + 2):
        batches.append(next(packer))
        cursors.append(packer.cursor)
    for at, cursor in enumerate(cursors[:-1]):
        stored = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
        resumed = Packer(documents, rows, length, seed, stored)
        assert all(same(next(resumed), batch) for batch in batches[at:])
        assert resumed.cursor == cursors[-1]


def test_another_row_length_goes_on_at_the_same_token():
    documents = numbered([7, 9, 5])
    packer = Packer(documents, 1, 10)
    next(packer)
    stream = np.concatenate([next(Packer(documents, 1, 40)).ids[0]])
    assert next(Packer(documents, 2, 4, cursor=packer.cursor)).ids.ravel().tolist() == stream[10:18].tolist()


def test_orders_differ_by_epoch_and_seed_and_never_change():
    documents = [np.array([number]) for number in range(8)]
    orders = [next(Packer(documents, 2, 8, seed)).ids.tolist() for seed in (0, 1)]
    assert orders == [
        [[7, 0, 1, 5, 3, 4, 2, 6], [5, 7, 6, 1, 0, 2, 4, 3]],
        [[5, 3, 7, 0, 4, 2, 6, 1], [5, 2, 3, 7, 4, 1, 0, 6]],
    ]


def test_the_cursor_counts_epochs_documents_and_tokens():
    packer = Packer(numbered([4, 4]), 1, 5)
    positions = []
    for _ in range(4):
        next(packer)
        positions.append((packer.cursor.epoch, packer.cursor.document, packer.cursor.offset))
    assert positions == [(0, 1, 1), (1, 0, 2), (1, 1, 3), (2, 1, 0)]


def test_a_cursor_of_other_data_is_refused():
    documents = numbered([4, 6])
    cursor = Packer(documents, 1, 4).cursor
    for other, seed in ((numbered([6, 4]), 0), (documents[:1], 0), (documents, 1)):
        with pytest.raises(InputError, match="does not belong to these documents and seed"):
            Packer(other, 1, 4, seed, cursor)
    with pytest.raises(InputError, match="points outside the 2 documents"):
        Packer(documents, 1, 4, cursor=Cursor(0, 2, 0, cursor.fingerprint))
    for state in ({"epoch": 0}, {**cursor.to_dict(), "offset": 1.5}, {**cursor.to_dict(), "rank": 0}):
        with pytest.raises(InputError, match="must hold epoch, document, offset"):
            Cursor.from_dict(state)


def test_nothing_to_pack_is_refused():
    for documents in ([], [np.array([1]), np.array([], dtype=np.int32)]):
        with pytest.raises(InputError, match="at least one document, and at least one token in each"):
            Packer(documents, 1, 4)
    with pytest.raises(InputError, match="rows 0 must be at least 1"):
        next(validation_batches(numbered([3]), 0, 4))
    with pytest.raises(InputError, match="sequence_length 1 at least 2"):
        Packer(numbered([3]), 1, 1)


def test_documents_open_and_close_and_their_bytes_are_all_predicted_in_one_long_row():
    tokenizer = Tokenizer.from_name("bpe-2048")
    texts = ["Who's there?", "Nay — answer me: stand, and unfold yourself."] * 40
    documents = encode_documents([Document(str(number), text) for number, text in enumerate(texts)], tokenizer)
    assert len(documents) == 80
    for ids, text in zip(documents, texts, strict=True):
        assert (ids.dtype, ids[0], ids[-1]) == (np.int32, 0, 1)
        assert tokenizer.decode(ids) == text
    (batch,) = validation_batches(documents, 1, sum(map(len, documents)))
    assert tokenizer.bytes_of(batch.labels) == sum(len(text.encode()) for text in texts)
    assert int((batch.labels == 1).sum()) == 80
