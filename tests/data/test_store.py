"""The store of tokens: the same documents in memory and on disk, whole or chosen."""

from pathlib import Path

import numpy as np
import pytest

from undertow.config.errors import InputError
from undertow.data.store import Part, TokenStore, token_dtype

DOCUMENTS = [[5, 6, 7], [8], [9, 10]]


def parts(folder: Path | None = None) -> list[Part]:
    """Five documents in two parts, the second one partly learned; memory-mapped where there is a folder."""
    held = [
        (np.array([5, 6, 7, 8], dtype="<u2"), [0, 3, 4], np.ones(4, dtype=bool)),
        (np.array([9, 10, 11, 12, 13, 14], dtype="<u2"), [0, 2, 3, 6], np.array([0, 1, 1, 0, 0, 1], dtype=bool)),
    ]
    found = []
    for number, (tokens, offsets, learned) in enumerate(held):
        arrays = [tokens, learned]
        if folder:
            for kind, array in enumerate(arrays):
                array.tofile(folder / f"{number}.{kind}")
                arrays[kind] = np.memmap(folder / f"{number}.{kind}", dtype=array.dtype, mode="r")
        found.append(Part(arrays[0], np.array(offsets), arrays[1]))
    return found


def test_documents_by_number():
    store = TokenStore.of(DOCUMENTS)
    assert [document.tolist() for document in store] == DOCUMENTS
    assert (len(store), store.tokens, store.lengths.tolist()) == (3, 6, [3, 1, 2])
    assert np.concatenate(store).tolist() == [5, 6, 7, 8, 9, 10]  # type: ignore[call-overload]
    ids, learned = store.read(0, 1, 9)
    assert ids.tolist() == [6, 7] and learned is None
    for outside in (3, -1):
        with pytest.raises(IndexError):
            store[outside]


@pytest.mark.parametrize("mapped", [False, True])
def test_parts_are_one_and_documents_can_be_chosen(mapped: bool, tmp_path: Path):
    store = TokenStore(parts(tmp_path if mapped else None))
    assert [d.tolist() for d in store] == [[5, 6, 7], [8], [9, 10], [11], [12, 13, 14]]
    chosen = TokenStore(parts(tmp_path if mapped else None), np.array([4, 2]))
    assert [d.tolist() for d in chosen] == [[12, 13, 14], [9, 10]] and chosen.tokens == 5
    ids, learned = chosen.read(0, 1, 3)
    assert (ids.tolist(), learned.tolist()) == ([13, 14], [False, True])
    assert TokenStore(parts()).content == store.content


def test_ids_take_two_bytes_where_they_fit():
    assert [token_dtype(size).str for size in (2, 65536, 65537, 129280)] == ["<u2", "<u2", "<u4", "<u4"]
    assert [TokenStore.of([[0, last]])[0].dtype.str for last in (65535, 65536)] == ["<u2", "<u4"]
    assert TokenStore.of([[2**32 - 1]])[0].tolist() == [2**32 - 1]


def test_the_digest_tells_tokens_borders_masks_and_choices_apart():
    masks = [np.array([1, 1, 1]), np.array([1]), np.array([1, 0])]
    stores = [
        *(TokenStore.of(DOCUMENTS), TokenStore.of([[5, 6], [7, 8], [9, 10]]), TokenStore.of([[5, 6, 7], [8], [9, 11]])),
        *(TokenStore.of(DOCUMENTS, masks), TokenStore.of(DOCUMENTS, [np.ones(3), np.ones(1), np.ones(2)])),
        *(TokenStore(parts()), TokenStore(parts(), np.array([4, 2])), TokenStore(parts(), np.array([2, 4]))),
    ]
    assert len({store.content for store in stores}) == len(stores)
    assert TokenStore.of(DOCUMENTS).content == stores[0].content == TokenStore.of(map(np.array, DOCUMENTS)).content


@pytest.mark.parametrize(
    ("documents", "learned", "message"),
    [
        ([], None, "at least one document, and at least one token in each"),
        ([[1], []], None, "at least one document, and at least one token in each"),
        ([[1, -1]], None, r"token ids -1 to 1 must lie between 0 and 4294967295"),
        ([[1, 2**32]], None, r"token ids 1 to 4294967296 must lie between 0 and 4294967295"),
        ([[1, 2]], [np.array([True])], "masks of 1 tokens do not fit documents of 2"),
    ],
)
def test_what_is_no_store_is_refused(documents, learned, message):
    with pytest.raises(InputError, match=message):
        TokenStore.of(documents, learned)
    with pytest.raises(InputError, match="at least one document"):
        TokenStore(parts(), np.array([], dtype=np.int64))
