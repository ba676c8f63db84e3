"""What the trained model writes: greedy tokens to compare loaded copies by, samples to read, and words to count."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from undertow.engine.llm import LLM
from undertow.engine.sampling import SamplingParams

PROMPTS = ("HAMLET:\n", "[Enter the KING")
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
TEMPERATURE = 0.8
_AT_ONCE = 24  # sequences of a round
_WORD = re.compile(r"[A-Za-z]{4,}")


@dataclass(frozen=True)
class Words:
    """Of `sampled` words of four or more letters, `known` occur in the corpus; `distinct` are different and known."""

    sampled: int
    known: int
    distinct: int


def greedy_tokens(llm: LLM) -> list[list[int]]:
    """The likeliest continuation of each prompt, as token ids."""
    return [completion.token_ids for completion in llm.generate(list(PROMPTS), GREEDY)]


def sampled(llm: LLM, prompt: str, tokens: int, seed: int) -> Iterator[str]:
    """A sample, in pieces as it is made, the prompt first."""
    yield prompt
    for chunk in llm.stream(prompt, _params(tokens, seed)):
        yield chunk.text


def sample_words(llm: LLM, corpus: str, wanted: int, tokens: int) -> Words:
    """The first `wanted` words of samples of `tokens` tokens each, compared with those of `corpus`.

    Names of speakers and prompts count like any other word, prompts themselves do not; a sample's last word may be cut
    off by its length and does not count either.
    """
    words: list[str] = []
    seed = len(PROMPTS)  # those before were shown
    while len(words) < wanted:
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(_AT_ONCE)]
        params = [_params(tokens, seed + number) for number in range(_AT_ONCE)]
        before = len(words)
        for completion in llm.generate(prompts, params):
            words += _WORD.findall(completion.text)[:-1]
        seed += _AT_ONCE
        if len(words) == before:
            break  # a model that writes no words at all
    vocabulary = {word.lower() for word in _WORD.findall(corpus)}
    known = [word.lower() for word in words[:wanted] if word.lower() in vocabulary]
    return Words(len(words[:wanted]), len(known), len(set(known)))


def _params(tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=TEMPERATURE, seed=seed, ignore_eos=True)
