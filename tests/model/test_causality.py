"""No logit depends on a later token: changing token t leaves every logit before it with the same bits.

In the batch-invariant mode whatever else the call holds; in the default mode between calls of the same shape, where the
number of tokens that an expert gets must not show either.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.model.oracle import randomise
from tests.model.small import small_config, tokens
from undertow.model.transformer import Output, Transformer
from undertow.ops import Ops
from undertow.ops.registry import REFERENCE

# Up to 300, around the window of 8, the groups of 4 and 8 and the blocks of 32 and 64 queries.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 300)
# Fewer entries than are visible, and more than there will ever be.
TOP_K = (3, 512)


def build(top_k: int, invariant: bool) -> Transformer:
    model = Transformer(small_config(index_topk=top_k), ops=Ops(batch_invariant=invariant))
    randomise(model, 7)
    return model


@pytest.fixture(scope="module", params=TOP_K, ids=lambda k: f"top-{k}")
def models(request):
    return build(request.param, True), build(request.param, False)


def changed(vocabulary: int, length: int, count: int = 4) -> tuple[Tensor, list[int]]:
    """Row 0 is a text, row `i` the same with token `places[i - 1]` replaced."""
    rng = random.Random(length)
    places = sorted({0, length - 1, *(rng.randrange(length) for _ in range(count - 2))})
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(length))
    ids = ids.repeat(len(places) + 1, 1)
    for row, place in enumerate(places, start=1):
        ids[row, place] = (ids[row, place] + 1 + rng.randrange(vocabulary - 1)) % vocabulary
    return ids, places


def assert_causal(rows: Tensor, places: list[int], reach: int) -> None:
    """`rows[i, p]` may depend on tokens up to `p + reach`."""
    for row, place in enumerate(places, start=1):
        first = max(place - reach, 0)
        assert torch.equal(rows[row, :first], rows[0, :first]), place
        assert not torch.equal(rows[row, first], rows[0, first]), place


@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_later_tokens_change_no_bit(models, length):
    model, _ = models
    ids, places = changed(model.config.vocab_size, length)
    out = model(ids, return_mtp=True)
    assert_causal(out.logits, places, 0)
    # The last position has no next token and holds zeros; a change of token 0 alone has nothing before it.
    if length > 1:
        assert_causal(out.mtp_logits, places, 1)


def alone(model: Transformer, ids: Tensor) -> Output:
    """Every row in a call of its own: in the default mode, bits are compared between calls of one shape."""
    parts = [model(row[None], return_mtp=True) for row in ids]
    return Output(torch.cat([p.logits for p in parts]), torch.cat([p.mtp_logits for p in parts]))


@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_nor_do_they_in_the_default_mode(models, length):
    _, model = models
    ids, places = changed(model.config.vocab_size, length)
    out = alone(model, ids)
    assert_causal(out.logits, places, 0)
    if length > 1:
        assert_causal(out.mtp_logits, places, 1)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(10))
@torch.no_grad()
def test_later_tokens_change_no_bit_at_any_length(models, share):
    invariant, default = models
    for length in range(1 + share, 301, 10):
        ids, places = changed(invariant.config.vocab_size, length, count=8)
        assert_causal(invariant(ids), places, 0)
        assert_causal(alone(default, ids).logits, places, 0)


@torch.no_grad()
def test_a_later_document_changes_no_bit_of_an_earlier_one(models):
    model, _ = models
    ids = tokens(model.config, 1, 60)
    documents = torch.tensor([[0] * 25 + [1] * 35])
    before = model(ids, segment_ids=documents)
    ids[0, 30] += 1
    ids %= model.config.vocab_size
    after = model(ids, segment_ids=documents)
    assert torch.equal(before[:, :30], after[:, :30]) and not torch.equal(before[:, 30:], after[:, 30:])


@torch.no_grad()
def test_a_leak_is_noticed(monkeypatch):
    """Entries of a group shown before the group is complete."""
    real = REFERENCE["csa_attention"]
    monkeypatch.setitem(
        REFERENCE, "csa_attention", lambda *given, ratio=0, **named: real(*given, ratio=max(ratio - 1, 0), **named)
    )
    model = build(512, invariant=True)
    ids, places = changed(model.config.vocab_size, 33)
    with pytest.raises(AssertionError):
        assert_causal(model(ids), places, 0)
