"""The text of a run belongs to its model."""

import numpy as np
import pytest

from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.config.schema import DataConfig, TrainConfig
from undertow.train.text import read_text, tokenizer_for

TINY = ModelConfig.from_preset("v4-tiny")


@pytest.mark.parametrize(("vocabulary", "entries"), [(2048, 2048), (4095, 2048), (4096, 4096), (129280, 4096)])
def test_small_bpe_is_the_largest_that_fits(vocabulary, entries):
    model = ModelConfig.from_preset("v4-tiny", vocab_size=vocabulary)
    assert tokenizer_for("small-bpe", model).vocab_size == entries


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("small-bpe", {"vocab_size": 300}, "vocab_size 300 is below that of every shipped tokenizer"),
        ("bpe-4096", {}, "its 4096 entries exceed the vocab_size 2048"),
        ("bpe-2048", {"eos_token_id": 7}, "begin and end tokens are 0 and 1, .* are 0 and 7"),
    ],
)
def test_a_tokenizer_that_is_not_the_models_is_refused(name, changes, message):
    with pytest.raises(InputError, match=message):
        tokenizer_for(name, TINY.model_copy(update=changes))


def test_held_out_text_is_the_same_each_time_and_none_of_it_is_trained_on(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\f".join(f"scene {i}: " + "words, words " * 9 for i in range(12)), "utf-8")
    data = DataConfig(corpus=str(corpus), validation_fraction=0.2)
    text = read_text(data, TINY)
    settings = TrainConfig(batch_size=2, sequence_length=16)
    assert {d.name for d in text.training} & {d.name for d in text.validation} == set()
    assert len(text.training_ids) == len(text.training) == 12 - len(text.validation)
    every = list(text.held_out(settings))
    assert sum(batch.ids.size for batch in every) == sum(map(len, text.validation_ids))
    assert [b.ids.tolist() for b in text.held_out(settings, 2)] == [b.ids.tolist() for b in every[:2]]
    assert np.array_equal(read_text(data, TINY).validation_ids[0], text.validation_ids[0])
