"""Held-out loss is pooled over labels and bytes."""

import numpy as np
import pytest
import torch

from tests.engine.bytelevel import VOCABULARY, tokenizer
from tests.model.small import small_config
from undertow.data.packing import validation_batches
from undertow.data.store import TokenStore
from undertow.model.build import build_model
from undertow.train.evaluation import Evaluation, evaluate


def test_figures():
    result = Evaluation(nats=12.0, labels=4, bytes=6)
    assert (result.loss, result.nats_per_byte) == (3.0, 2.0)


@pytest.fixture
def uniform():
    """A model that finds every token equally likely."""
    model = build_model(small_config(vocab_size=VOCABULARY))
    with torch.no_grad():
        model.head.weight.zero_()
    return model


def test_uniform_model_costs_the_logarithm_of_its_vocabulary(uniform):
    words = tokenizer()
    documents = [np.array([0, *words.encode(text), 1], dtype=np.int32) for text in ("to be", "or not to be that is")]
    batches = list(validation_batches(TokenStore.of(documents), rows=2, sequence_length=8))
    assert [batch.ids.shape for batch in batches] == [(2, 8), (1, 8), (1, 5)]
    result = evaluate(uniform, batches, words, "cpu")
    # 29 tokens in five segments, whose first tokens are nobody's label; 25 letters, of which three start a segment.
    assert (result.labels, result.bytes) == (24, 22)
    assert result.loss == pytest.approx(np.log(VOCABULARY), rel=1e-6)
    assert result.nats_per_byte == pytest.approx(24 / 22 * np.log(VOCABULARY), rel=1e-6)


def test_division_into_batches_does_not_matter():
    model, words = build_model(small_config(vocab_size=VOCABULARY), seed=5), tokenizer()
    documents = [np.array([0, *words.encode("now is the winter of our discontent"), 1], dtype=np.int32)] * 3
    one, three = (
        evaluate(model, validation_batches(TokenStore.of(documents), rows, 16), words, "cpu") for rows in (1, 3)
    )
    assert (one.labels, one.bytes) == (three.labels, three.bytes)
    assert one.nats == pytest.approx(three.nats, rel=1e-6)
