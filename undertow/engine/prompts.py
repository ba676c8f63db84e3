"""Prompts as they come from callers, turned into checked token ids: what cannot run is refused at the door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from undertow.config.errors import InputError
from undertow.engine.sampling import SamplingParams, as_index, said

if TYPE_CHECKING:
    from undertow.config.model import ModelConfig
    from undertow.data.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text or one list of ids becomes a list of one prompt. Raises `InputError` when there is none."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()  # type: ignore[union-attr]  # an array or a tensor
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Sequence):
        raise InputError(f"prompts are a {type(prompts).__name__}: give a text, a list of texts, or lists of token ids")
    if not prompts:
        raise InputError("prompts are empty: give at least one prompt of at least one token")
    if all(as_index(item) is not None for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises `InputError` for a tokenizer larger than the model's vocabulary or with other begin and end tokens."""
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {config.vocab_size}:"
            " they do not belong together"
        )
    if (tokenizer.bos_id, tokenizer.eos_id) != (config.bos_token_id, config.eos_token_id):
        raise InputError(
            f"the tokenizer's begin and end tokens are {tokenizer.bos_id} and {tokenizer.eos_id}, the model's"
            f" bos_token_id and eos_token_id are {config.bos_token_id} and {config.eos_token_id}; make them equal"
        )


def to_ids(prompt: Prompt, number: int, config: ModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of prompt `number`; a text is encoded as it stands after one begin-of-sequence token.

    Raises `InputError` for an empty prompt, a text without a tokenizer, or an id outside the vocabulary.
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()  # type: ignore[union-attr]  # an array or a tensor
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise InputError(f"prompt {number} is {said(prompt)}: give a text or a list of token ids")
    if len(prompt) == 0:
        raise InputError(
            f"prompt {number} is empty: give at least one token, such as [{config.bos_token_id}] (begin of sequence)"
        )
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InputError(
                f"prompt {number} is text, but the model has no tokenizer.json: give token ids, or add the file"
            )
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"prompt {number} holds {said(prompt[error.start])} at {error.start}, which is no character of UTF-8"
            ) from None
        return [config.bos_token_id, *tokenizer.encode(prompt)]
    return [_token(token, position, number, config) for position, token in enumerate(prompt)]


def _token(given: object, position: int, number: int, config: ModelConfig) -> int:
    token = as_index(given)
    if token is None or not 0 <= token < config.vocab_size:
        raise InputError(
            f"prompt {number}: token {said(given)} at position {position} is outside the vocabulary of"
            f" {config.vocab_size} (ids 0 to {config.vocab_size - 1})"
        )
    return token


def check_request(ids: Sequence[int], number: int, params: SamplingParams, config: ModelConfig, has_text: bool) -> None:
    """Raises `InputError` when the request cannot be carried out to its end by this model."""
    if not isinstance(params, SamplingParams):
        raise InputError(f"params of prompt {number} are {said(params)}: give SamplingParams")
    limit = config.max_position_embeddings
    if len(ids) + params.max_tokens > limit:
        raise InputError(
            f"prompt {number} has {len(ids)} tokens and max_tokens is {params.max_tokens}: together over the model's"
            f" max_position_embeddings of {limit}; shorten the prompt or lower max_tokens"
        )
    outside = [token for token in params.stop_token_ids if token >= config.vocab_size]
    if outside:
        raise InputError(f"stop_token_ids {outside} lie outside the vocabulary of {config.vocab_size}")
    if params.stop and not has_text:
        raise InputError(
            f"stop {list(params.stop)}: the model has no tokenizer.json to find texts with; use stop_token_ids"
        )
