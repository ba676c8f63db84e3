"""The engine around a written-down model: who is batched with whom, what the model is asked, where outputs end."""

import pytest
import torch

from tests.engine.bytelevel import VOCABULARY, ids_of, tokenizer
from tests.engine.scripted import Scripted, by_rule, saying
from undertow.config.errors import InputError, UndertowError
from undertow.config.model import ModelConfig
from undertow.engine.llm import LLM
from undertow.engine.sampling import SamplingParams

CONFIG = ModelConfig.from_preset("v4-debug", vocab_size=VOCABULARY)
GREEDY = SamplingParams(temperature=0, max_tokens=9)


def hashed() -> Scripted:
    """A model whose next token mixes every token of the history with its place."""
    return Scripted(CONFIG, by_rule(VOCABULARY, lambda h: sum(t * (3 * i + 7) for i, t in enumerate(h)) % VOCABULARY))


def expected(prompt: list[int], tokens: int) -> list[int]:
    history, made = list(prompt), []
    for _ in range(tokens):
        made.append(sum(t * (3 * i + 7) for i, t in enumerate(history)) % VOCABULARY)
        history.append(made[-1])
        if made[-1] == CONFIG.eos_token_id:
            break
    return made


PROMPTS = [[5], [9, 8, 7], [200] * 40, [1, 2], [77, 3, 250, 4, 4]]


@pytest.mark.parametrize("max_sequences", [1, 2, 32])
def test_a_ragged_batch_follows_each_history_exactly(max_sequences: int):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 9, 1, 20, 6)]
    completions = LLM(hashed(), max_sequences=max_sequences).generate(PROMPTS, params)
    for prompt, wish, completion in zip(PROMPTS, params, completions, strict=True):
        assert completion.prompt_token_ids == prompt
        assert completion.token_ids == expected(prompt, wish.max_tokens)
        assert len(completion.logprobs) == len(completion.token_ids)


def test_no_more_than_max_sequences_run_and_finished_ones_leave():
    model = hashed()
    LLM(model, max_sequences=2).generate(
        [[5], [6], [7]], [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3, 2)]
    )
    assert model.calls == [(1, 1), (1,), (1,), (1,), (1,)]


def test_prefill_asks_for_the_logits_of_last_rows_alone():
    model = hashed()
    LLM(model).generate([[4] * 1300, [5] * 600], SamplingParams(temperature=0, max_tokens=1))
    assert model.calls == [(512, 512), (512, 88), (276, 0)]
    assert model.rows_of_logits == [2]


def test_stream_joins_to_the_completion():
    llm = LLM(Scripted(CONFIG, saying([0], ids_of("to", "한", "be", "END"), VOCABULARY)), tokenizer=tokenizer())
    params = SamplingParams(temperature=0, stop=("eEN",))
    chunks = list(llm.stream([0], params))
    (completion,) = llm.generate([0], params)
    assert [c.text for c in chunks] == ["to", "", "", "한", "b", ""]
    assert "".join(c.text for c in chunks) == completion.text == "to한b"
    assert [t for c in chunks for t in c.token_ids] == completion.token_ids == ids_of("to", "한", "be", "END")
    assert [v for c in chunks for v in c.logprobs] == completion.logprobs
    assert [c.finish_reason for c in chunks] == [None] * 5 + ["stop"] and completion.finish_reason == "stop"


def test_the_end_of_sequence_ends_unless_ignored():
    llm = LLM(Scripted(CONFIG, saying([0], [*ids_of("be"), 1, *ids_of("to"), 1], VOCABULARY)), tokenizer=tokenizer())
    (ended,) = llm.generate([0], GREEDY)
    assert (ended.text, ended.token_ids, ended.finish_reason) == ("be", [*ids_of("be"), 1], "stop")
    (on,) = llm.generate([0], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert (on.text, on.token_ids, on.finish_reason) == ("beto", [*ids_of("be"), 1, *ids_of("to")], "length")


def test_a_text_prompt_follows_the_begin_of_sequence():
    llm = LLM(Scripted(CONFIG, saying([0, *ids_of("oh ")], ids_of("be"), VOCABULARY)), tokenizer=tokenizer())
    for prompts in ("oh ", ["oh "]):
        (completion,) = llm.generate(prompts, GREEDY)
        assert completion.prompt_token_ids == [0, *ids_of("oh ")]
        assert completion.text == "be"


def test_a_seed_draws_the_same_in_any_company_and_fresh_draws_differ():
    llm = LLM(hashed(), max_sequences=3)
    mine = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
    (alone,) = llm.generate([9, 8, 7], mine)
    noise = SamplingParams(max_tokens=7, top_k=4, top_p=0.7)
    for row in range(4):
        prompts = [[3], [4, 4], [5] * 9]
        prompts.insert(row, [9, 8, 7])
        params = [noise, SamplingParams(temperature=0), noise]
        params.insert(row, mine)
        assert llm.generate(prompts, params)[row] == alone
    fresh = SamplingParams(max_tokens=12, temperature=4.0, ignore_eos=True)
    assert llm.generate([3], fresh) != llm.generate([3], fresh)


def test_everything_is_refused_before_anything_runs():
    model = hashed()
    with pytest.raises(InputError, match="prompt 1: token 900 at position 1"):
        LLM(model).generate([[1], [2, 900]])
    with pytest.raises(InputError, match="2 sampling parameters for 1 prompts"):
        LLM(model).generate([1], [GREEDY, GREEDY])
    with pytest.raises(InputError, match="prompt 0 is text"):
        LLM(model).stream("hello")
    with pytest.raises(InputError, match="prompt 0 has 4000 tokens and max_tokens is 97"):
        LLM(model).stream([5] * 4000, SamplingParams(max_tokens=97))
    assert model.calls == []


def test_nothing_is_sampled_from_broken_logits():
    model = Scripted(CONFIG, lambda history: torch.full((VOCABULARY,), float("nan")))
    with pytest.raises(UndertowError, match="not finite"):
        LLM(model).generate([3])


def test_a_tokenizer_must_fit_the_vocabulary():
    small = Scripted(CONFIG.model_copy(update={"vocab_size": 256}), by_rule(256, lambda h: 1))
    with pytest.raises(InputError, match=f"the tokenizer has {VOCABULARY} tokens and the model only 256"):
        LLM(small, tokenizer=tokenizer())
    with pytest.raises(InputError, match="max_sequences=0"):
        LLM(small, max_sequences=0)
