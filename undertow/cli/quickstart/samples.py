"""What the trained model writes: greedy tokens to compare loaded copies by, and samples to read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from undertow.engine.llm import LLM
from undertow.engine.sampling import SamplingParams

PROMPTS = ("HAMLET:\n", "[Enter the KING")
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
_WORD = re.compile(r"[A-Za-z]{4,}")


def greedy_tokens(llm: LLM) -> list[list[int]]:
    """The likeliest continuation of each prompt, as token ids."""
    return [completion.token_ids for completion in llm.generate(list(PROMPTS), GREEDY)]


def sampled(llm: LLM, prompt: str, tokens: int, seed: int) -> Iterator[str]:
    """A sample at temperature 0.8, in pieces as it is made, the prompt first."""
    yield prompt
    for chunk in llm.stream(prompt, SamplingParams(max_tokens=tokens, temperature=0.8, seed=seed, ignore_eos=True)):
        yield chunk.text


def known_words(samples: list[str], corpus: str) -> tuple[int, int]:
    """How many words of four or more letters in `samples` occur in `corpus`, and how many there are.

    A sample's last word may be cut off by its length and does not count.
    """
    vocabulary = {word.lower() for word in _WORD.findall(corpus)}
    words = [word.lower() for sample in samples for word in _WORD.findall(sample)[:-1]]
    return sum(word in vocabulary for word in words), len(words)
