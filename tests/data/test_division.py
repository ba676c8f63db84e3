"""The division into training and held-out documents."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.config.errors import InputError
from undertow.data.corpus import Document, load_corpus
from undertow.data.division import held_out, split


def test_the_default_split_of_the_plays_holds_out_two_percent_in_whole_scenes():
    plays = load_corpus("plays")
    training, validation = split(plays)
    assert (len(training), len(validation)) == (763, 18)
    assert sum(len(document.text.encode()) for document in validation) == 102_085
    assert sorted(document.name for document in training + validation) == sorted(document.name for document in plays)
    assert (training, validation) == split(plays)
    assert split(plays, seed=1)[1] != validation


def test_no_part_of_a_split_is_ever_empty():
    pair = [Document("a", "x" * 1000), Document("b", "y")]
    for fraction in (1e-9, 0.5, 0.999):
        for seed in range(4):
            training, validation = split(pair, fraction, seed)
            assert {document.name for document in training + validation} == {"a", "b"}
            assert len(training) == len(validation) == 1


@given(
    documents=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 1000)), min_size=2, max_size=30),
    fraction=st.floats(1e-6, 1 - 1e-6),
)
def test_documents_are_drawn_by_key_until_they_hold_the_fraction(documents, fraction):
    keys, sizes = np.array([k for k, _ in documents], dtype=np.uint64), np.array([size for _, size in documents])
    drawn = held_out(keys, sizes, fraction)
    assert 0 < drawn.sum() < len(drawn)
    wanted = fraction * sizes.sum()
    left = ~drawn & (sizes <= max(wanted, sizes.mean()))  # could have been drawn
    assert not left.any() or max(keys[drawn]) <= min(keys[left])
    last = np.flatnonzero(drawn & (keys == max(keys[drawn])))[-1]
    assert sizes[drawn].sum() - sizes[last] < wanted  # one fewer would not have been enough
    assert sizes[drawn].sum() >= wanted or not left.any() or (~drawn).sum() == 1
    assert sizes[drawn].sum() < wanted + max(wanted, sizes.mean())


@pytest.mark.parametrize(
    ("sizes", "fraction", "held"),
    [
        ([110_864, 15, 15], 0.02, {15}),
        ([15, 110_864, 15], 0.5, {15}),
        ([110_864, 3000, 3000], 0.02, {3000}),
        ([110_864, 100_000, 15, 15], 0.02, {15}),
        ([1000, 1], 0.999, {1, 1000}),
        ([7] * 12, 0.02, {7}),
    ],
)
def test_a_document_that_dwarfs_the_fraction_stays_in_training(sizes, fraction, held):
    for seed in range(20):
        keys = np.random.default_rng(seed).integers(0, 2**63, len(sizes)).astype(np.uint64)
        drawn = held_out(keys, np.array(sizes), fraction)
        assert 0 < drawn.sum() < len(sizes) and set(np.array(sizes)[drawn]) <= held
        order = np.random.default_rng(seed).permutation(len(sizes))
        assert held_out(keys[order], np.array(sizes)[order], fraction).tolist() == drawn[order].tolist()


def test_the_draw_goes_by_content_and_not_by_place(tmp_path: Path):
    texts = [f"text {number}" for number in range(30)]

    def held(path: Path) -> set[str]:
        return {document.text for document in split(load_corpus(path), 0.3)[1]}

    (tmp_path / "a.txt").write_text("\f".join(texts))
    (tmp_path / "b.txt").write_text("\f".join(reversed(texts)))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text, "name": "x"}) + "\n" for text in texts))
    drawn = [held(tmp_path / name) for name in ("a.txt", "b.txt", "c.jsonl", "d.jsonl")]
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3] and 8 <= len(drawn[0]) <= 10


def test_one_document_is_cut_at_a_line_break():
    training, validation = split([Document("a", "one\ntwo\nthree\nfour\n")], 0.25)
    assert training == [Document("a (start)", "one\ntwo\nthree\n")]
    assert validation == [Document("a (end)", "four\n")]
    training, validation = split([Document("a", "abcdefgh")], 0.25)
    assert (training[0].text, validation[0].text) == ("abcdef", "gh")


@pytest.mark.parametrize("fraction", [0, 1, -0.5, float("nan")])
def test_a_fraction_outside_zero_to_one_is_refused(fraction: float):
    with pytest.raises(InputError, match="must lie between 0 and 1"):
        split([Document("a", "text"), Document("b", "text")], fraction)


def test_nothing_to_divide_is_refused():
    with pytest.raises(InputError, match="no documents cannot be divided"):
        split([])
    with pytest.raises(InputError, match=r"one document cannot be divided .* give at least two"):
        held_out(np.zeros(1, np.uint64), np.ones(1, np.int64), 0.5)
    with pytest.raises(InputError, match="'a' of one character"):
        split([Document("a", "x")])
