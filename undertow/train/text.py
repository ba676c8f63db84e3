"""The data of a run: a corpus encoded and divided, or prepared shards; and a check that it belongs to the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.config.training import DataConfig
from undertow.data.corpus import SHIPPED as SHIPPED_CORPORA
from undertow.data.corpus import Document, load_corpus
from undertow.data.division import split
from undertow.data.examples import held_side, read_examples
from undertow.data.manifest import TOKENIZER, Manifest, TokenizerFacts
from undertow.data.packing import Batch, validation_batches
from undertow.data.prepared import is_prepared, open_shards
from undertow.data.records import HUB
from undertow.data.store import TokenStore
from undertow.data.tokenizer import SHIPPED, Tokenizer

SMALL_BPE = "small-bpe"


@dataclass(frozen=True)
class Text:
    """Training and held-out documents as token ids, and their tokenizer.

    `training` and `validation` are the same documents as text where they were asked for; else they are empty.
    """

    tokenizer: Tokenizer
    training_ids: TokenStore
    validation_ids: TokenStore
    training: list[Document] = field(default_factory=list)
    validation: list[Document] = field(default_factory=list)

    def held_out(self, rows: int, sequence_length: int, sequences: int | None = None) -> Iterator[Batch]:
        """The first `sequences` rows of held-out text, all of it by default, in batches of at most `rows` rows.

        The same rows each time, however many are in a batch.
        """
        left = sequences
        for batch in validation_batches(self.validation_ids, rows, sequence_length):
            if left is not None:
                batch = Batch(batch.ids[:left], batch.segment_ids[:left], batch.labels[:left])
                left -= len(batch.ids)
            yield batch
            if left == 0:  # the rest is not even packed
                return


def read_text(data: DataConfig, model: ModelConfig, init_from: str | None = None, keep_text: bool = False) -> Text:
    """Load, divide and encode the corpus, or open its shards.

    The tokenizer of the model directory `init_from`, where it has one, is the run's. `keep_text` keeps the documents of
    a corpus of kind text as text, too. The division does not depend on the run's seed: held-out text stays held out
    from run to run, and from the shipped tokenizers. Raises `InputError` for a corpus or a tokenizer that cannot be
    used, or one that is not the model's.
    """
    if is_prepared(data.corpus):
        return _prepared(data, model, init_from)
    tokenizer = tokenizer_for(data.tokenizer, model, init_from)
    # A key that says nothing about this source is left unread, so that setting it is refused.
    hub_split = data.split if data.corpus.startswith(HUB) else "train"
    fieldless = data.kind == "chat" or data.corpus in SHIPPED_CORPORA or data.corpus.endswith(".txt")
    text_field = "text" if fieldless else data.text_field
    stream, parts = read_examples(data.corpus, tokenizer, data.kind, text_field, hub_split, data.validation_fraction)
    examples = list(stream)
    drawn = held_side([e.key for e in examples], [e.size for e in examples], data.validation_fraction, parts)

    def store(side: np.ndarray) -> TokenStore:
        chosen = [examples[number] for number in np.flatnonzero(side)]
        masks = [example.learned for example in chosen if example.learned is not None]
        return TokenStore.of((example.ids for example in chosen), masks or None)

    documents: tuple[list[Document], list[Document]] = [], []
    if keep_text and data.kind == "text":
        documents = split(load_corpus(data.corpus, text_field, hub_split), data.validation_fraction)
    return Text(tokenizer, store(~drawn), store(drawn), *documents)


def _prepared(data: DataConfig, model: ModelConfig, init_from: str | None) -> Text:
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
    tokenizer = Tokenizer.from_directory(directory / TOKENIZER)
    if TokenizerFacts.of(tokenizer) != manifest.tokenizer:
        raise InputError(f"{directory / TOKENIZER}: is not the tokenizer of these shards; prepare them again")
    if data.tokenizer != SMALL_BPE and Tokenizer.load(data.tokenizer).identity != tokenizer.identity:
        raise InputError(
            f"data.tokenizer {data.tokenizer}: is not the tokenizer of the shards in {directory}; "
            f"set data.tokenizer={SMALL_BPE}, which is theirs here"
        )
    learned = _learned_with(init_from)
    if learned and learned.identity != tokenizer.identity:
        raise InputError(
            f"data.corpus {directory}: its shards have another tokenizer than the model in {init_from}; "
            f"prepare them again with --tokenizer {init_from}"
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"data.corpus {directory}: the {tokenizer.vocab_size} entries of its tokenizer exceed the model's "
            f"vocab_size {model.vocab_size}; prepare it again with --tokenizer "
            f"{_largest_shipped(model) or 'and a smaller one'}"
        )
    _check_ends(tokenizer, f"data.corpus {directory}", model)
    return Text(tokenizer, *open_shards(directory, manifest))


def tokenizer_for(name: str, model: ModelConfig, init_from: str | None = None) -> Tokenizer:
    """`small-bpe`: that of the model directory `init_from`, else the largest shipped one that the vocabulary holds.

    Any other name is one that `Tokenizer.load` takes. Raises `InputError` where the tokenizer and the model do not
    belong together.
    """
    learned = _learned_with(init_from)
    if name != SMALL_BPE:
        tokenizer = Tokenizer.load(name)
    elif learned:
        tokenizer = learned
    elif shipped := _largest_shipped(model):
        tokenizer = Tokenizer.from_name(shipped)
    else:
        raise InputError(
            f"data.tokenizer {SMALL_BPE}: the model's vocab_size {model.vocab_size} is below that of every shipped "
            f"tokenizer ({', '.join(SHIPPED)}); name a directory with a smaller tokenizer.json"
        )
    if learned and tokenizer.identity != learned.identity:
        raise InputError(
            f"data.tokenizer {name}: is not the tokenizer.json of the model in {init_from}; "
            f"set data.tokenizer={SMALL_BPE}, which is that one here"
        )
    told = f"data.tokenizer {name}"
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(f"{told}: its {tokenizer.vocab_size} entries exceed the vocab_size {model.vocab_size}")
    _check_ends(tokenizer, told, model)
    return tokenizer


def _learned_with(init_from: str | None) -> Tokenizer | None:
    """The tokenizer of the model that a run starts from, if its directory has one."""
    if init_from and os.path.isfile(Path(init_from) / "tokenizer.json"):
        return Tokenizer.from_directory(init_from)
    return None


def _largest_shipped(model: ModelConfig) -> str | None:
    sizes = {name: Tokenizer.from_name(name).vocab_size for name in SHIPPED}
    return max((name for name in SHIPPED if sizes[name] <= model.vocab_size), key=lambda n: sizes[n], default=None)


def _check_ends(tokenizer: Tokenizer, told: str, model: ModelConfig) -> None:
    ends = tokenizer.bos_id, tokenizer.eos_id
    if ends != (model.bos_token_id, model.eos_token_id):
        raise InputError(
            f"{told}: begin and end tokens are {ends[0]} and {ends[1]}, the model's bos_token_id and "
            f"eos_token_id are {model.bos_token_id} and {model.eos_token_id}; make them equal"
        )
