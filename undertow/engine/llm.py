"""`LLM`: a model directory or a model in memory, ready to complete prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from undertow.config.errors import InputError
from undertow.engine.draws import Draws
from undertow.engine.loading import load_directory, load_tokenizer
from undertow.engine.prompts import Prompt, as_list, check_request, check_tokenizer, to_ids
from undertow.engine.runner import Batch
from undertow.engine.sampler import sample
from undertow.engine.sampling import SamplingParams, as_index, said
from undertow.engine.stream import Chunk, FinishReason, OutputStream

if TYPE_CHECKING:
    from undertow.data.tokenizer import Tokenizer
    from undertow.model.transformer import Transformer


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    `token_ids` are all tokens sampled, the ending one included; `logprobs` are the model's own (before temperature and
    filters), in nats, one a token; `text` ends before a stop string and is empty for a model without a tokenizer.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float]

    def as_dict(self) -> dict[str, object]:
        """The fields by name, ready for JSON."""
        return asdict(self)


@dataclass
class _Request:
    ids: list[int]
    params: SamplingParams
    draws: Draws
    output: OutputStream
    made: int = 0

    def next_uniform(self) -> float:
        self.made += 1
        return self.draws.uniform(self.made - 1)


class LLM:
    """Completes prompts with one model; up to `max_sequences` of them at a time, the rest wait.

    A prompt is text or token ids. Text is encoded as it stands, after one begin-of-sequence token, without any chat
    template; ids are taken exactly as given.
    """

    def __init__(
        self,
        model: Transformer | str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        batch_invariant: bool = False,
        max_sequences: int = 32,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Load a model directory in `dtype` on `device`, or take a model as it is, with its own dtype, device and ops.

        `batch_invariant` asks for operators that give a sequence the same bits in any company. `tokenizer` replaces
        the directory's `tokenizer.json`. Raises `InputError` for what cannot be loaded, and for a tokenizer that
        does not belong to the model.
        """
        if (as_index(max_sequences) or 0) < 1:
            raise InputError(f"max_sequences={said(max_sequences)}: give a whole number, at least 1")
        if model == "":
            raise InputError("the model path is empty: give a model directory")
        if isinstance(model, (str, Path)):
            tokenizer = tokenizer or load_tokenizer(model)
            self.model = load_directory(model, dtype, device, batch_invariant)
        else:
            self.model = model
            if batch_invariant and not model.ops.batch_invariant:
                raise InputError("batch_invariant: this model was built without it; give it Ops(batch_invariant=True)")
        self.config = self.model.config
        self.tokenizer = tokenizer
        self.max_sequences = max_sequences
        if tokenizer is not None:
            check_tokenizer(tokenizer, self.config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several; the answers come in the order of the prompts.

        `params` hold for all prompts, or are given one a prompt; the default is `SamplingParams()`. Prompts that share
        a seed share their draws: give each its own seed for independent samples. Every request is checked before any
        runs.
        Raises `InputError` for a prompt or a parameter that cannot be carried out.
        """
        requests = self._requests(as_list(prompts), params)
        pieces: list[list[Chunk]] = [[] for _ in requests]
        for number, chunk in self._run(requests):
            pieces[number].append(chunk)
        return [_joined(request, chunks) for request, chunks in zip(requests, pieces, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt, giving a `Chunk` for every token as it is sampled.

        Errors as `generate`, raised by this call itself. Closing the iterator ends the generation.
        """
        requests = self._requests([prompt], params)
        return (chunk for _, chunk in self._run(requests))

    def _requests(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Request]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence):
            raise InputError(f"params are {said(params)}: give SamplingParams, or a list of them, one a prompt")
        if len(params) != len(prompts):
            raise InputError(
                f"{len(params)} sampling parameters for {len(prompts)} prompts: give one for all, or one a prompt"
            )
        return [
            self._request(prompt, number, p) for number, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]

    def _request(self, prompt: Prompt, number: int, params: SamplingParams) -> _Request:
        ids = to_ids(prompt, number, self.config, self.tokenizer)
        check_request(ids, number, params, self.config, has_text=self.tokenizer is not None)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (self.config.eos_token_id,))}
        return _Request(ids, params, Draws.of(params.seed), OutputStream(params, ends, self.tokenizer))

    def _run(self, requests: Sequence[_Request]) -> Iterator[tuple[int, Chunk]]:
        """Chunks with the number of their request, `max_sequences` requests at a time."""
        for first in range(0, len(requests), self.max_sequences):
            yield from self._run_together(range(first, min(first + self.max_sequences, len(requests))), requests)

    def _run_together(self, numbers: Sequence[int], requests: Sequence[_Request]) -> Iterator[tuple[int, Chunk]]:
        live = list(numbers)
        batch = Batch(self.model, [requests[n].ids for n in live])
        while True:
            asked = [requests[n] for n in live]
            sampled = sample(batch.logits, [r.params for r in asked], [r.next_uniform() for r in asked])
            tokens = sampled.ids.tolist()
            for number, token, logprob in zip(live, tokens, sampled.logprobs.tolist(), strict=True):
                yield number, requests[number].output.push(token, logprob)
            going = [row for row, number in enumerate(live) if requests[number].output.finish_reason is None]
            if not going:
                return
            if len(going) < len(live):
                batch.keep(going)
            live = [live[row] for row in going]
            batch.step([tokens[row] for row in going])


def _joined(request: _Request, chunks: Sequence[Chunk]) -> Completion:
    reason = chunks[-1].finish_reason
    assert reason is not None
    return Completion(
        prompt_token_ids=request.ids,
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        text="".join(chunk.text for chunk in chunks),
        finish_reason=reason,
        logprobs=[value for chunk in chunks for value in chunk.logprobs],
    )
