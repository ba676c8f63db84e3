"""The text of a run: corpus divided and encoded, the tokenizer, and a check that it belongs to the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.config.schema import DataConfig, TrainConfig
from undertow.data.corpus import Document, load_corpus, split
from undertow.data.packing import Batch, encode_documents, validation_batches
from undertow.data.tokenizer import SHIPPED, Tokenizer

SMALL_BPE = "small-bpe"


@dataclass(frozen=True)
class Text:
    """Training and held-out documents as text and as token ids, and the tokenizer between them."""

    tokenizer: Tokenizer
    training: list[Document]
    validation: list[Document]
    training_ids: list[np.ndarray]
    validation_ids: list[np.ndarray]

    def held_out(self, settings: TrainConfig, batches: int | None = None) -> Iterator[Batch]:
        """The first `batches` batches of held-out text, all of it by default; the same ones each time."""
        every = validation_batches(self.validation_ids, settings.batch_size, settings.sequence_length)
        return islice(every, batches)


def read_text(data: DataConfig, model: ModelConfig) -> Text:
    """Load, divide and encode the corpus.

    The division does not depend on the run's seed: held-out text stays held out from run to run, and from the shipped
    tokenizers. Raises `InputError` for a corpus or a tokenizer that cannot be used, or one that is not the model's.
    """
    tokenizer = tokenizer_for(data.tokenizer, model)
    training, validation = split(load_corpus(data.corpus), data.validation_fraction)
    training_ids, validation_ids = (encode_documents(part, tokenizer) for part in (training, validation))
    return Text(tokenizer, training, validation, training_ids, validation_ids)


def tokenizer_for(name: str, model: ModelConfig) -> Tokenizer:
    """`small-bpe`, the largest shipped tokenizer that the model's vocabulary holds; else a shipped name or a directory.

    Raises `InputError` where the tokenizer and the model do not belong together.
    """
    if name == SMALL_BPE:
        fitting = [t for t in map(Tokenizer.from_name, SHIPPED) if t.vocab_size <= model.vocab_size]
        if not fitting:
            raise InputError(
                f"data.tokenizer {SMALL_BPE}: the model's vocab_size {model.vocab_size} is below that of every shipped "
                f"tokenizer ({', '.join(SHIPPED)}); name a directory with a smaller tokenizer.json"
            )
        tokenizer = max(fitting, key=lambda t: t.vocab_size)
    else:
        tokenizer = Tokenizer.from_name(name) if name in SHIPPED else Tokenizer.from_directory(name)
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"data.tokenizer {name}: its {tokenizer.vocab_size} entries exceed the vocab_size {model.vocab_size}"
        )
    ends = tokenizer.bos_id, tokenizer.eos_id
    if ends != (model.bos_token_id, model.eos_token_id):
        raise InputError(
            f"data.tokenizer {name}: begin and end tokens are {ends[0]} and {ends[1]}, the model's bos_token_id and "
            f"eos_token_id are {model.bos_token_id} and {model.eos_token_id}; make them equal"
        )
    return tokenizer
