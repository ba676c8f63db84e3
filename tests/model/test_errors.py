"""Bad input is one sentence: the thing, the value, what is allowed."""

from __future__ import annotations

import pytest
import torch

from tests.model.small import small_config, tokens
from undertow.config.errors import InputError
from undertow.model.build import build_model
from undertow.model.cache import ContiguousCache
from undertow.model.transformer import Transformer
from undertow.ops.segments import Segments


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build_model(small_config(max_position_embeddings=32))


@pytest.fixture
def ids(model) -> torch.Tensor:
    return tokens(model.config, 2, 5)


def message(call, *arguments, **named) -> str:
    with pytest.raises(InputError) as caught, torch.no_grad():
        call(*arguments, **named)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("wrong", [256, -1, 2**40])
def test_token_outside_the_vocabulary(model, ids, wrong):
    ids[1, 2] = wrong
    words = f"token id {wrong} at [1, 2] lies outside the vocabulary of 256 (0 to 255)"
    assert message(model, ids) == words
    mask = torch.ones_like(ids)
    mask[0] = 0
    assert message(model, ids, attention_mask=mask) == words
    assert message(model, ids, cache=model.new_cache(2)) == words


@torch.no_grad()
def test_padding_may_hold_any_id(model, ids):
    mask = torch.ones_like(ids)
    mask[1, 2] = 0
    wanted = model(ids, attention_mask=mask)
    ids[1, 2] = -100
    assert torch.equal(model(ids, attention_mask=mask), wanted)


def test_document_beyond_the_limit(model):
    words = "a document of 33 tokens exceeds max_position_embeddings 32: shorten it"
    assert message(model, tokens(model.config, 1, 33)) == words
    cache = model.new_cache(1)
    with torch.no_grad():
        model(tokens(model.config, 1, 30), cache=cache)
    assert message(model, tokens(model.config, 1, 3), cache=cache) == words
    assert cache.lengths == (30,)


@torch.no_grad()
def test_packed_documents_count_one_by_one(model):
    documents = torch.arange(50)[None] // 25
    assert model(tokens(model.config, 1, 50), segment_ids=documents).shape == (1, 50, 256)


@pytest.mark.parametrize("name", ["attention_mask", "positions", "segment_ids"])
def test_shapes_that_differ(model, ids, name):
    given = torch.ones(2, 4, dtype=torch.int64)
    assert message(model, ids, **{name: given}) == (
        f"{name} has shape [2, 4]; input_ids has [2, 5]: they must be equal"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.zeros(5, dtype=torch.int64), "input_ids has shape [5] and type torch.int64"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), "input_ids has shape [1, 2, 3] and type torch.int64"),
        (torch.zeros(2, 5), "input_ids has shape [2, 5] and type torch.float32"),
        (torch.zeros(2, 5, dtype=torch.bool), "input_ids has shape [2, 5] and type torch.bool"),
    ],
)
def test_ids_of_another_shape_or_type(model, given, words):
    assert message(model, given) == words + ": [batch, sequence] of int64 is needed"


@torch.no_grad()
def test_int32_ids_serve_too(model, ids):
    assert torch.equal(model(ids.int()), model(ids))


@pytest.mark.parametrize(
    ("positions", "place", "wanted"),
    [([0, 1, 2, 3, 5], 5, 0), ([1, 2, 3, 4, 5], 1, 0), ([0, 1, 1, 2, 3], 1, 0), ([0, 1, 0, 1, 1], 1, 0)],
)
def test_positions_that_neither_follow_nor_restart(model, ids, positions, place, wanted):
    ours = torch.arange(5).repeat(2, 1)
    ours[1] = torch.tensor(positions)
    text = message(model, ids, positions=ours)
    assert text.startswith(f"position {place} in row 1: {wanted} was expected")
    assert "count up by one from 0" in text


def test_positions_against_segment_ids(model, ids):
    segments = torch.tensor([[0, 0, 1, 1, 1]] * 2)
    text = message(model, ids, segment_ids=segments, positions=torch.arange(5).repeat(2, 1))
    assert text.startswith("position 2 in row 0: 0 was expected")
    text = message(model, ids, segment_ids=segments, positions=torch.tensor([[0, 1, 0, 0, 1]] * 2))
    assert text.startswith("position 0 in row 0: 1 was expected")


@torch.no_grad()
def test_positions_of_padding_are_not_read(model, ids):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    positions = torch.tensor([[7, 7, 0, 1, 2], [0, 1, 2, 9, 9]])
    assert torch.equal(model(ids, attention_mask=mask, positions=positions), model(ids, attention_mask=mask))


def test_cache_of_other_rows_or_documents(model, ids):
    assert message(model, ids, cache=model.new_cache(3)) == (
        "input_ids has 2 rows; the cache holds 3 sequences: they must be equal"
    )
    segments = torch.tensor([[0, 0, 1, 1, 1], [0] * 5])
    assert message(model, ids, segment_ids=segments, cache=model.new_cache(2)) == (
        "a row with a cache is one document: segment_ids and positions may not start another in it"
    )
    cache = model.new_cache(2)
    with torch.no_grad():
        model(ids, cache=cache)
    text = message(model, ids, positions=torch.arange(5).repeat(2, 1), cache=cache)
    assert text.startswith("position 0 in row 0: 5 was expected") and "from the 5 tokens its cache holds" in text


@torch.no_grad()
def test_positions_may_continue_a_cache(model, ids):
    caches = [model.new_cache(2) for _ in range(2)]
    for cache in caches:
        model(ids, cache=cache)
    positions = torch.arange(5, 10).repeat(2, 1)
    assert torch.equal(model(ids, positions=positions, cache=caches[0]), model(ids, cache=caches[1]))


def test_cache_of_no_sequence():
    assert message(ContiguousCache, 3, 0) == "a cache for 0 sequences: at least 1 is needed"


def test_draft_logits_with_a_cache(model, ids):
    cache = model.new_cache(2)
    text = message(model, ids, cache=cache, return_mtp=True)
    assert text.startswith("return_mtp with a cache") and "model.draft" in text
    assert cache.lengths == (0, 0)


def test_draft_of_a_model_without_mtp():
    config = small_config(num_nextn_predict_layers=0, compress_ratios=(0, 4, 8))
    plain = build_model(config)
    words = "this model has no MTP block (num_nextn_predict_layers is 0)"
    ids = tokens(config, 1, 5)
    calls = []
    plain.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    assert message(plain, ids, return_mtp=True) == words
    assert calls == []
    segments = Segments.from_lengths([5])
    streams = torch.zeros(5, config.hc_mult, config.hidden_size)
    assert message(plain.draft, streams, ids[0], segments) == words


@torch.no_grad()
def test_no_rows_and_no_columns(model):
    assert model(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 256)
    out = model(torch.zeros(2, 0, dtype=torch.int64), return_mtp=True)
    assert out.logits.shape == out.mtp_logits.shape == (2, 0, 256)
