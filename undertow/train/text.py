"""The data of a run: a corpus encoded and divided, or prepared shards; and a check that it belongs to the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.config.training import DataConfig, TrainConfig
from undertow.data.chat import encode_conversations, read_conversations
from undertow.data.corpus import SHIPPED as SHIPPED_CORPORA
from undertow.data.corpus import Document, load_corpus
from undertow.data.division import held_out, split
from undertow.data.encoding import Example, encode_documents
from undertow.data.manifest import TOKENIZER, Manifest
from undertow.data.packing import Batch, validation_batches
from undertow.data.prepared import is_prepared, open_shards
from undertow.data.records import HUB
from undertow.data.store import TokenStore
from undertow.data.tokenizer import SHIPPED, Tokenizer

SMALL_BPE = "small-bpe"


@dataclass(frozen=True)
class Text:
    """Training and held-out documents as token ids, and their tokenizer.

    `training` and `validation` are the same documents as text where a corpus of kind text was read; they are empty for
    conversations and for prepared shards.
    """

    tokenizer: Tokenizer
    training_ids: TokenStore
    validation_ids: TokenStore
    training: list[Document] = field(default_factory=list)
    validation: list[Document] = field(default_factory=list)

    def held_out(self, settings: TrainConfig, batches: int | None = None) -> Iterator[Batch]:
        """The first `batches` batches of held-out text, all of it by default; the same ones each time."""
        every = validation_batches(self.validation_ids, settings.batch_size, settings.sequence_length)
        return islice(every, batches)


def read_text(data: DataConfig, model: ModelConfig) -> Text:
    """Load, divide and encode the corpus, or open its shards.

    The division does not depend on the run's seed: held-out text stays held out from run to run, and from the shipped
    tokenizers. Raises `InputError` for a corpus or a tokenizer that cannot be used, or one that is not the model's.
    """
    tokenizer = tokenizer_for(data.tokenizer, model)
    if is_prepared(data.corpus):
        return _prepared(data, tokenizer)
    # A key that says nothing about this source is left unread, so that setting it is refused.
    hub_split = data.split if data.corpus.startswith(HUB) else "train"
    if data.kind == "chat":
        conversations = read_conversations(data.corpus, hub_split)
        return _chat(encode_conversations(conversations, tokenizer), data.validation_fraction, tokenizer)
    named = data.corpus in SHIPPED_CORPORA or data.corpus.endswith(".txt")
    documents = load_corpus(data.corpus, "text" if named else data.text_field, hub_split)
    training, validation = split(documents, data.validation_fraction)
    training_ids, validation_ids = (
        TokenStore.of(each.ids for each in encode_documents(part, tokenizer)) for part in (training, validation)
    )
    return Text(tokenizer, training_ids, validation_ids, training, validation)


def _chat(conversations: Iterator[Example], validation_fraction: float, tokenizer: Tokenizer) -> Text:
    examples = list(conversations)
    keys = np.array([example.key for example in examples], dtype=np.uint64)
    sizes = np.array([example.size for example in examples], dtype=np.int64)
    drawn = held_out(keys, sizes, validation_fraction)

    def store(side: np.ndarray) -> TokenStore:
        chosen = [examples[number] for number in np.flatnonzero(side)]
        return TokenStore.of((e.ids for e in chosen), (e.learned for e in chosen if e.learned is not None))

    return Text(tokenizer, store(~drawn), store(drawn))


def _prepared(data: DataConfig, tokenizer: Tokenizer) -> Text:
    """The shards of a directory, where kind, division and tokenizer are those that the run names."""
    directory = Path(data.corpus)
    manifest = Manifest.read(directory)
    if data.kind != manifest.kind:
        raise InputError(f"data.kind {data.kind}: the shards of {directory} are of kind {manifest.kind}; set it so")
    if data.validation_fraction != manifest.validation_fraction:
        raise InputError(
            f"data.validation_fraction {data.validation_fraction}: the shards of {directory} were divided with "
            f"{manifest.validation_fraction}; set it so, or prepare them again"
        )
    if tokenizer.identity != manifest.tokenizer.identity:
        raise InputError(
            f"data.tokenizer {data.tokenizer}: is not the tokenizer of the shards in {directory}; "
            f"set data.tokenizer={directory / TOKENIZER}"
        )
    return Text(tokenizer, *open_shards(directory, manifest))


def tokenizer_for(name: str, model: ModelConfig) -> Tokenizer:
    """`small-bpe`, the largest shipped tokenizer that the model's vocabulary holds; else what `Tokenizer.load` takes.

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
        tokenizer = Tokenizer.load(name)
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
