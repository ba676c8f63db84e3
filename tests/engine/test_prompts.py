import pytest

from tests.engine.bytelevel import ids_of, tokenizer
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.engine.prompts import as_list, check_request, to_ids
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
