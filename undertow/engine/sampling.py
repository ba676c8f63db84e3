"""What a request may ask of the sampler: temperature, filters, seed, length and where to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from undertow.config.errors import InputError

SEEDS = 2**64


def _whole(name: str, value: object, low: int, high: float, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
        raise InputError(f"sampling parameter {name}={value!r}: {allowed}")


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"sampling parameter {name}={value!r}: give a finite number")
    return float(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; the defaults are DeepSeek's own (temperature 1, top-p 1, no top-k).

    The filters act in this order: temperature, top-k, top-p. Raises `InputError` naming the field, the value and what
    is allowed.
    """

    max_tokens: int = field(
        default=64, metadata={"help": "tokens to generate at most, the ending token included; >= 1"}
    )
    temperature: float = field(
        default=1.0,
        metadata={"help": "divisor of the logits; 0 takes the likeliest token, the lowest id on ties; >= 0"},
    )
    top_k: int = field(default=0, metadata={"help": "likeliest tokens kept, ties to the lowest id; 0 keeps all"})
    top_p: float = field(
        default=1.0, metadata={"help": "probability mass kept: the fewest likeliest tokens that reach it; 0 < p <= 1"}
    )
    seed: int | None = field(
        default=None,
        metadata={
            "help": "the request's own randomness, 0 to 2^64 - 1: equal seeds draw alike; None draws a fresh seed"
        },
    )
    stop: tuple[str, ...] = field(
        default=(), metadata={"help": "texts that end the generation; the text returned ends before the first of them"}
    )
    stop_token_ids: tuple[int, ...] = field(
        default=(), metadata={"help": "token ids that end the generation, beside the end-of-sequence token"}
    )
    ignore_eos: bool = field(default=False, metadata={"help": "go on after the end-of-sequence token"})

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, math.inf, "give a whole number of tokens, at least 1")
        if _real("temperature", self.temperature) < 0:
            raise InputError(f"sampling parameter temperature={self.temperature!r}: give 0 (greedy) or more")
        _whole("top_k", self.top_k, 0, math.inf, "give 0 (off) or a whole number of tokens")
        if not 0 < _real("top_p", self.top_p) <= 1:
            raise InputError(f"sampling parameter top_p={self.top_p!r}: give a probability mass above 0 and up to 1")
        if self.seed is not None:
            _whole("seed", self.seed, 0, SEEDS, "give a whole number from 0 to 2^64 - 1, or None for a fresh one")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InputError(f"sampling parameter stop={text!r}: give texts of at least one character")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, math.inf, "give token ids, 0 or more")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
