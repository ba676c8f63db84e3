"""What a request may ask of the sampler: temperature, filters, seed, length and where to stop."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from undertow.config.errors import InputError

SEEDS = 2**64
TOKENS = 2**63


def said(value: object) -> str:
    """A value as a message shows it: its Python text, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return f"a {type(value).__name__} of too many digits"
    return text if len(text) <= 100 else f"{text[:100]}..."


def as_index(value: object) -> int | None:
    """A whole number of Python's or numpy's as an int; None for anything else, booleans too."""
    if isinstance(value, bool) or getattr(value, "shape", ()) != ():  # an array of one number is a list
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _refused(name: str, value: object, allowed: str) -> InputError:
    return InputError(f"sampling parameter {name}={said(value)}: {allowed}")


def _whole(name: str, value: object, low: int, high: int, allowed: str) -> int:
    number = as_index(value)
    if number is None or not low <= number < high:
        raise _refused(name, value, allowed)
    return number


def _real(name: str, value: object) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond every float
        pass
    raise _refused(name, value, "give a finite number")


def _items(name: str, value: object, allowed: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise _refused(name, value, allowed)
    return tuple(value)


def _stops(value: object) -> tuple[str, ...]:
    allowed = "give texts of at least one character"
    texts = (value,) if isinstance(value, str) else _items("stop", value, allowed)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _refused("stop", text, allowed)
    return texts


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
        put = partial(object.__setattr__, self)
        whole = "give a whole number of tokens, at least 1"
        put("max_tokens", _whole("max_tokens", self.max_tokens, 1, TOKENS, whole))
        if _real("temperature", self.temperature) < 0:
            raise _refused("temperature", self.temperature, "give 0 (greedy) or more")
        put("top_k", _whole("top_k", self.top_k, 0, TOKENS, "give 0 (off) or a whole number of tokens"))
        if not 0 < _real("top_p", self.top_p) <= 1:
            raise _refused("top_p", self.top_p, "give a probability mass above 0 and up to 1")
        if self.seed is not None:
            seeds = "give a whole number from 0 to 2^64 - 1, or None for a fresh one"
            put("seed", _whole("seed", self.seed, 0, SEEDS, seeds))
        if not isinstance(self.ignore_eos, bool):
            raise _refused("ignore_eos", self.ignore_eos, "give True or False")
        put("stop", _stops(self.stop))
        ids = "give token ids, 0 or more"
        tokens = _items("stop_token_ids", self.stop_token_ids, ids)
        put("stop_token_ids", tuple(_whole("stop_token_ids", token, 0, TOKENS, ids) for token in tokens))
