"""`LLM` on the real debug model: every token against the model's own whole-sequence forward."""

from functools import cache

import pytest
import torch

from tests.engine.bytelevel import VOCABULARY, tokenizer
from undertow.checkpoint.directory import save_model
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.engine.llm import LLM
from undertow.engine.runner import Batch
from undertow.engine.sampling import SamplingParams
from undertow.model.build import build_model
from undertow.model.transformer import Transformer
from undertow.ops import Ops

CONFIG = ModelConfig.from_preset("v4-debug", vocab_size=VOCABULARY)
# Around the window of 8 and the ratios 4 and 8, and beyond the selection's 4 * (3 + 1) tokens.
LENGTHS = (1, 3, 4, 5, 8, 9, 17, 34)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@cache
def model(invariant: bool = False) -> Transformer:
    built = build_model(CONFIG, seed=3, ops=Ops(batch_invariant=invariant))
    with torch.no_grad():
        built.head.weight.mul_(25)  # fresh weights give flat logits, where every comparison is a tie
    return built


@cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def whole_logits(ids: list[int]) -> torch.Tensor:
    """Logits `[S, V]` of one sequence in one call, without a cache."""
    with torch.no_grad():
        logits = model()(torch.tensor([ids]))
    assert isinstance(logits, torch.Tensor)
    return logits[0]


def test_greedy_is_the_argmax_of_the_whole_sequence_and_so_are_the_logprobs():
    for completion in LLM(model()).generate(prompts(), GREEDY):
        ids = completion.prompt_token_ids + completion.token_ids
        logits = whole_logits(ids)[len(completion.prompt_token_ids) - 1 : -1]
        assert completion.token_ids == logits.argmax(-1).tolist()
        wanted = logits.double().log_softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), wanted, rtol=0, atol=1e-4)


def test_the_choices_are_no_ties():
    (completion,) = LLM(model()).generate(prompts()[-1], GREEDY)
    best = whole_logits(completion.prompt_token_ids + completion.token_ids).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-4
    assert len(set(completion.token_ids)) > 4


@pytest.mark.parametrize("max_sequences", [3, 32])
def test_greedy_together_is_greedy_alone(max_sequences: int):
    together = LLM(model(), max_sequences=max_sequences).generate(prompts(), GREEDY)
    alone = [LLM(model()).generate(prompt, GREEDY)[0] for prompt in prompts()]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_batch_invariant_operators_give_the_same_bits_in_any_company():
    llm = LLM(model(invariant=True), batch_invariant=True)
    params = [SamplingParams(seed=i, max_tokens=2 + i, top_p=0.9, ignore_eos=True) for i in range(len(LENGTHS))]
    together = llm.generate(prompts(), params)
    assert together == [llm.generate(prompt, p)[0] for prompt, p in zip(prompts(), params, strict=True)]
    assert llm.generate(prompts()[::-1], params[::-1]) == together[::-1]


def test_batch_invariance_is_not_promised_by_a_model_without_it():
    with pytest.raises(InputError, match="this model was built without it"):
        LLM(model(), batch_invariant=True)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_any_chunk_of_the_prefill_gives_the_same_logits(chunk: int):
    whole = Batch(model(invariant=True), prompts()).logits
    assert torch.equal(Batch(model(invariant=True), prompts(), chunk, chunk + 7).logits, whole)
    torch.testing.assert_close(Batch(model(), prompts(), chunk, chunk + 7).logits, whole, rtol=0, atol=2e-4)


def test_a_seed_draws_the_same_alone_and_among_others():
    llm = LLM(model())
    params = [SamplingParams(seed=40 + i, max_tokens=6, ignore_eos=True) for i in range(len(LENGTHS))]
    together = llm.generate(prompts(), params)
    for prompt, p, completion in zip(prompts(), params, together, strict=True):
        assert llm.generate(prompt, p)[0].token_ids == completion.token_ids
    assert len({tuple(c.token_ids) for c in llm.generate([prompts()[3]] * 8, params)}) == 8


def test_repeated_runs_are_equal():
    llm = LLM(model())
    answers = [llm.generate([7] * 40, GREEDY)[0] for _ in range(3)]
    assert answers == [answers[0]] * 3


def test_streams_join_to_completions_and_stops_cut_them():
    llm = LLM(model(), tokenizer=tokenizer())
    free = SamplingParams(seed=6, max_tokens=30, ignore_eos=True)
    (whole,) = llm.generate("To be", free)
    assert whole.text == tokenizer().decode(whole.token_ids)
    at = len(whole.text) // 2
    stop = whole.text[at : at + 3]
    params = SamplingParams(seed=6, max_tokens=30, ignore_eos=True, stop=(stop,))
    (cut,) = llm.generate("To be", params)
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert stop in tokenizer().decode(cut.token_ids)
    chunks = list(llm.stream("To be", params))
    assert "".join(c.text for c in chunks) == cut.text
    assert [t for c in chunks for t in c.token_ids] == cut.token_ids
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["stop"]


def test_a_bfloat16_model_decodes():
    built = build_model(CONFIG, seed=3, dtype=torch.bfloat16)
    (completion,) = LLM(built).generate(prompts()[4], GREEDY)
    assert len(completion.token_ids) == 8 and completion.finish_reason == "length"


def test_the_model_is_left_as_it_was():
    before = [p.requires_grad for p in model().parameters()]
    LLM(model()).generate(prompts()[0], GREEDY)
    assert [p.requires_grad for p in model().parameters()] == before and model().training
    model()(torch.tensor([prompts()[2]])).sum().backward()  # type: ignore[union-attr]
    assert model().head.weight.grad is not None
    model().zero_grad()


def test_a_directory_with_and_without_a_tokenizer(tmp_path):
    save_model(model(), tmp_path / "ids")
    save_model(model(), tmp_path / "text", tokenizer=tokenizer())
    prompt = [0, *tokenizer().encode("to be")]
    (wanted,) = LLM(model()).generate(prompt, GREEDY)
    assert wanted.text == ""
    assert LLM(tmp_path / "ids").generate(prompt, GREEDY) == [wanted]
    with pytest.raises(InputError, match="prompt 0 is text, but the model has no"):
        LLM(tmp_path / "ids").generate("to be")
    (spoken,) = LLM(str(tmp_path / "text")).generate("to be", GREEDY)
    assert (spoken.prompt_token_ids, spoken.token_ids) == (prompt, wanted.token_ids)
    assert spoken.text == tokenizer().decode(wanted.token_ids)


@pytest.mark.parametrize(
    ("device", "message"),
    [("cdua", "device 'cdua' is not known"), ("meta", "device 'meta' is not supported"), ("cuda:99", "torch sees")],
)
def test_a_device_that_is_not_there(device: str, message: str, tmp_path):
    with pytest.raises(InputError, match=message):
        LLM(tmp_path, device=device)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([None], None, "prompt 0 is None: give a text"),
        ([[1]], {"top_k": 1}, r"params are \{'top_k': 1\}: give SamplingParams"),
        ([[1]], ["x"], "params of prompt 0 are 'x': give SamplingParams"),
    ],
)
def test_a_request_of_another_type(prompts, params, message):
    with pytest.raises(InputError, match=message):
        LLM(model()).generate(prompts, params)


def test_a_model_without_a_path():
    with pytest.raises(InputError, match="the model path is empty: give a model directory"):
        LLM("")
