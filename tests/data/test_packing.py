import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.config.errors import InputError
from undertow.data.corpus import Document
from undertow.data.encoding import encode_documents
from undertow.data.order import epoch_order
from undertow.data.packing import IGNORED, Batch, Cursor, Packer, validation_batches
from undertow.data.store import TokenStore
from undertow.data.tokenizer import Tokenizer

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=8)
shapes = st.tuples(st.integers(1, 3), st.integers(2, 12))
schedules = st.lists(shapes, min_size=1, max_size=12)
seeds = st.integers(0, 5)


def numbered(lengths: list[int], masked: bool = False) -> TokenStore:
    """Documents in which no id occurs twice: 100 times the document's number, plus its place; odd ids are learned."""
    documents = [np.arange(length) + 100 * number for number, length in enumerate(lengths, 1)]
    return TokenStore.of(documents, (document % 2 == 1 for document in documents) if masked else None)


def check(batch: Batch, masked: bool = False) -> None:
    """Segments are runs of one document counted from 0, and labels are the learned next tokens inside them."""
    for ids, segments, labels in zip(batch.ids, batch.segment_ids, batch.labels, strict=True):
        assert segments[0] == 0 and set(np.diff(segments)) <= {0, 1}
        for place in range(len(ids)):
            if place + 1 < len(ids) and segments[place] == segments[place + 1]:
                assert ids[place + 1] == ids[place] + 1
                assert labels[place] == (IGNORED if masked and ids[place + 1] % 2 == 0 else ids[place + 1])
            else:
                assert labels[place] == IGNORED
            if place and segments[place] != segments[place - 1]:
                assert ids[place] % 100 == 0  # inside a row a segment starts at a document's start
    assert (batch.ids.dtype, batch.segment_ids.dtype, batch.labels.dtype) == (np.int64, np.int32, np.int64)


def same(left: Batch, right: Batch) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in ("ids", "segment_ids", "labels"))


def test_rows_continue_a_document_as_a_new_segment():
    store = TokenStore.of([np.arange(5), np.arange(100, 103)])
    batch, rest = validation_batches(store, rows=2, sequence_length=3)
    assert batch.ids.tolist() == [[0, 1, 2], [3, 4, 100]]
    assert batch.segment_ids.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert batch.labels.tolist() == [[1, 2, IGNORED], [4, IGNORED, IGNORED]]
    assert rest.ids.tolist() == [[101, 102]] and rest.labels.tolist() == [[102, IGNORED]]


def test_labels_are_the_learned_tokens():
    store = TokenStore.of([[7, 8, 9, 1], [5, 6, 1]], [np.array([0, 0, 1, 1]), np.array([1, 0, 1])])
    (batch,) = validation_batches(store, 1, 7)
    assert batch.labels.tolist() == [[IGNORED, 9, 1, IGNORED, IGNORED, 1, IGNORED]]


@settings(deadline=None)
@given(lengths=lengths, shape=shapes, seed=seeds)
def test_every_epoch_gives_every_token_once(lengths: list[int], shape: tuple[int, int], seed: int):
    store = numbered(lengths)
    total, (rows, length) = sum(lengths), shape
    batches = list(islice(Packer(store, rows, length, seed), -(-3 * total // (rows * length))))
    for batch in batches:
        check(batch)
    stream = np.concatenate([batch.ids.ravel() for batch in batches])
    for epoch in range(3):
        tokens = stream[epoch * total : (epoch + 1) * total]
        assert Counter(tokens.tolist()) == Counter(np.concatenate(list(store)).tolist())


@settings(deadline=None)
@given(lengths=lengths, schedule=schedules, seed=seeds, masked=st.booleans())
def test_shapes_may_change_at_every_step_and_no_token_is_lost(lengths, schedule, seed, masked):
    store = numbered(lengths, masked)
    packer = Packer(store, 1, 2, seed)
    batches = [packer.take(*shape) for shape in schedule]
    for batch, shape in zip(batches, schedule, strict=True):
        check(batch, masked)
        assert batch.ids.shape == shape
    stream = np.concatenate([batch.ids.ravel() for batch in batches])
    epochs = -(-len(stream) // sum(lengths))
    orders = [epoch_order(len(lengths), seed, epoch) for epoch in range(epochs)]
    wanted = np.concatenate([store[int(document)] for order in orders for document in order])
    assert stream.tolist() == wanted[: len(stream)].tolist()


@settings(deadline=None)
@given(lengths=lengths, schedule=schedules, seed=seeds, masked=st.booleans())
def test_resuming_anywhere_gives_the_same_batches(lengths, schedule, seed, masked):
    store = numbered(lengths, masked)
    packer = Packer(store, 1, 2, seed)
    cursors, batches = [packer.cursor], []
    for shape in schedule:
        batches.append(packer.take(*shape))
        cursors.append(packer.cursor)
    for at, cursor in enumerate(cursors[:-1]):
        stored = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
        resumed = Packer(store, 3, 5, seed, stored)
        assert all(same(resumed.take(*shape), batch) for shape, batch in zip(schedule[at:], batches[at:], strict=True))
        assert resumed.cursor == cursors[-1]


@settings(deadline=None)
@given(lengths=lengths, shape=shapes, masked=st.booleans())
def test_validation_gives_every_token_once_in_order(lengths: list[int], shape: tuple[int, int], masked: bool):
    store, (rows, length) = numbered(lengths, masked), shape
    batches = list(validation_batches(store, rows, length))
    for batch in batches:
        check(batch, masked)
    assert np.concatenate([b.ids.ravel() for b in batches]).tolist() == np.concatenate(list(store)).tolist()
    full = [batch for batch in batches if batch.ids.shape[1] == length]
    assert all(batch.ids.shape == (rows, length) for batch in full[:-1])
    assert len(batches) - len(full) == (1 if sum(lengths) % length else 0)


def test_next_takes_the_shape_it_was_given():
    packer, other = (Packer(numbered([7, 9, 5]), 2, 4) for _ in range(2))
    assert all(same(next(packer), other.take(2, 4)) for _ in range(5)) and packer.cursor == other.cursor


def test_a_short_corpus_fills_long_rows_by_going_round():
    batch = Packer(numbered([3]), 1, 8).take(1, 8)
    assert batch.ids.tolist() == [[100, 101, 102, 100, 101, 102, 100, 101]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]]


def test_the_cursor_counts_epochs_documents_and_tokens():
    packer = Packer(numbered([4, 4]), 1, 5)
    positions = []
    for _ in range(4):
        next(packer)
        positions.append((packer.cursor.epoch, packer.cursor.document, packer.cursor.offset))
    assert positions == [(0, 1, 1), (1, 0, 2), (1, 1, 3), (2, 1, 0)]


def test_a_cursor_of_other_data_is_refused():
    store = numbered([4, 6])
    cursor = Packer(store, 1, 4).cursor
    for other, seed in ((numbered([6, 4]), 0), (numbered([4]), 0), (store, 1), (numbered([4, 6], masked=True), 0)):
        with pytest.raises(InputError, match="does not belong to these documents and seed"):
            Packer(other, 1, 4, seed, cursor)
    mark = cursor.fingerprint
    for outside in (Cursor(0, 2, 0, mark), Cursor(0, -1, 0, mark), Cursor(0, 0, 6, mark), Cursor(0, 0, -1, mark)):
        with pytest.raises(InputError, match="points outside the 2 documents"):
            Packer(store, 1, 4, cursor=outside)
    for epoch in (-1, 2**63):
        with pytest.raises(InputError, match="points outside the 2 documents"):
            Packer(store, 1, 4, cursor=Cursor(epoch, 0, 0, mark))
    for state in ({"epoch": 0}, {**cursor.to_dict(), "offset": 1.5}, {**cursor.to_dict(), "rank": 0}):
        with pytest.raises(InputError, match="must hold epoch, document, offset"):
            Cursor.from_dict(state)


def test_impossible_shapes_are_refused():
    with pytest.raises(InputError, match="rows 0 must be at least 1"):
        next(validation_batches(numbered([3]), 0, 4))
    with pytest.raises(InputError, match="sequence_length 1 at least 2"):
        Packer(numbered([3]), 1, 1)
    with pytest.raises(InputError, match="rows 0 must be at least 1"):
        Packer(numbered([3]), 1, 2).take(0, 2)


def test_documents_open_and_close_and_their_bytes_are_all_predicted_in_one_long_row():
    tokenizer = Tokenizer.from_name("bpe-2048")
    texts = ["Who's there?", "Nay — answer me: stand, and unfold yourself."] * 40
    examples = list(encode_documents((Document(str(number), text) for number, text in enumerate(texts)), tokenizer))
    assert len(examples) == 80
    for example, text in zip(examples, texts, strict=True):
        assert (example.ids[0], example.ids[-1], example.size, example.learned) == (0, 1, len(text.encode()), None)
        assert tokenizer.decode(example.ids) == text
    store = TokenStore.of(example.ids for example in examples)
    (batch,) = validation_batches(store, 1, store.tokens)
    assert tokenizer.bytes_of(batch.labels) == sum(len(text.encode()) for text in texts)
    assert int((batch.labels == 1).sum()) == 80
