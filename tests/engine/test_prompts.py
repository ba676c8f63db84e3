import numpy as np
import pytest

from tests.engine.bytelevel import ids_of, tokenizer
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.engine.prompts import as_list, check_request, check_tokenizer, to_ids
from undertow.engine.sampling import SamplingParams

CONFIG = ModelConfig.from_preset("v4-debug", vocab_size=300, max_position_embeddings=100)


def test_one_prompt_or_many():
    assert as_list("to be") == ["to be"]
    assert as_list([1, 2]) == [[1, 2]]
    assert as_list(["a", "b"]) == ["a", "b"]
    assert as_list([[1], [2, 3]]) == [[1], [2, 3]]
    assert as_list(["a", [2, 3]]) == ["a", [2, 3]]


def test_text_follows_one_begin_of_sequence_and_ids_stay_as_given():
    assert to_ids("tö", 0, CONFIG, tokenizer()) == [0, *ids_of("tö")]
    assert to_ids([5, 0, 1], 0, CONFIG, tokenizer()) == [5, 0, 1]


def test_a_text_cannot_forge_the_end_of_sequence():
    assert 1 not in to_ids(tokenizer().eos_token, 0, CONFIG, tokenizer())


@pytest.mark.parametrize("prompts", [[], ()])
def test_no_prompt_at_all(prompts):
    with pytest.raises(InputError, match="prompts are empty"):
        as_list(prompts)


@pytest.mark.parametrize("prompts", [5, None, {"a": 1}])
def test_not_a_prompt(prompts):
    with pytest.raises(InputError, match="give a text, a list of texts, or lists of token ids"):
        as_list(prompts)


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt(prompt):
    with pytest.raises(InputError, match=r"prompt 3 is empty: .* \[0\]"):
        to_ids(prompt, 3, CONFIG, tokenizer())


@pytest.mark.parametrize("token", [-1, 300, 2**31, True, 1.0, "x", None])
def test_a_token_outside_the_vocabulary(token):
    with pytest.raises(InputError) as error:
        to_ids([7, 8, token], 2, CONFIG, None)
    assert f"prompt 2: token {token!r} at position 2 is outside the vocabulary of 300 (ids 0 to 299)" in str(
        error.value
    )


def test_text_without_a_tokenizer():
    with pytest.raises(InputError, match=r"prompt 0 is text, but the model has no tokenizer\.json"):
        to_ids("hello", 0, CONFIG, None)
    with pytest.raises(InputError, match=r"stop \['x'\]: the model has no tokenizer\.json"):
        check_request([1], 0, SamplingParams(stop=("x",)), CONFIG, has_text=False)


def test_the_length_limit_to_the_token():
    check_request([1] * 60, 0, SamplingParams(max_tokens=40), CONFIG, has_text=False)
    with pytest.raises(
        InputError, match=r"prompt 1 has 60 tokens and max_tokens is 41: .* max_position_embeddings of 100"
    ):
        check_request([1] * 60, 1, SamplingParams(max_tokens=41), CONFIG, has_text=False)


def test_a_stop_token_outside_the_vocabulary():
    with pytest.raises(InputError, match=r"stop_token_ids \[300\] lie outside the vocabulary of 300"):
        check_request([1], 0, SamplingParams(stop_token_ids=(299, 300)), CONFIG, has_text=False)


def test_numpy_ids_are_ids():
    assert as_list(np.array([1, 2])) == [[1, 2]]  # type: ignore[arg-type]
    ids = to_ids([np.int64(5), np.int32(0)], 0, CONFIG, None)  # type: ignore[list-item]
    assert (ids, [type(token) for token in ids]) == ([5, 0], [int, int])
    assert to_ids(np.array([3, 4]), 0, CONFIG, None) == [3, 4]  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 5, b"ab", {"a": 1}])
def test_a_prompt_that_is_neither_text_nor_ids(prompt):
    with pytest.raises(InputError) as error:
        to_ids(prompt, 1, CONFIG, tokenizer())
    assert str(error.value) == f"prompt 1 is {prompt!r}: give a text or a list of token ids"


def test_bytes_are_no_prompts():
    with pytest.raises(InputError, match="prompts are a bytes: give a text"):
        as_list(b"ab")  # type: ignore[arg-type]


def test_text_that_is_no_utf_8():
    with pytest.raises(InputError) as error:
        to_ids("a\udcff", 0, CONFIG, tokenizer())
    assert str(error.value) == "prompt 0 holds '\\udcff' at 1, which is no character of UTF-8"


def test_params_that_are_none():
    with pytest.raises(InputError, match=r"params of prompt 0 are \{'top_k': 1\}: give SamplingParams"):
        check_request([1], 0, {"top_k": 1}, CONFIG, has_text=False)  # type: ignore[arg-type]


def test_a_tokenizer_of_another_model():
    other = CONFIG.model_copy(update={"bos_token_id": 1, "eos_token_id": 0})
    with pytest.raises(InputError, match=r"begin and end tokens are 0 and 1, .* eos_token_id are 1 and 0; make them"):
        check_tokenizer(tokenizer(), other)
    with pytest.raises(InputError, match="the tokenizer has 264 tokens and the model only 200"):
        check_tokenizer(tokenizer(), CONFIG.model_copy(update={"vocab_size": 200}))
