"""From a corpus to a directory of shards in one pass: encoded, written, divided and described."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from undertow.config.errors import InputError
from undertow.data.chat import encode_conversations, read_conversations
from undertow.data.corpus import read_documents
from undertow.data.division import check_fraction, cut, held_out
from undertow.data.encoding import Example, encode_documents
from undertow.data.manifest import HELD_OUT, MANIFEST, TOKENIZER, FileFacts, Manifest, Side, TokenizerFacts
from undertow.data.records import HUB, Reading
from undertow.data.shards import ShardWriter, new_directory, write_synced
from undertow.data.tokenizer import Tokenizer

Kind = Literal["text", "chat"]


@dataclass
class Preparation:
    """How far a preparation is: documents, tokens and bytes of text written, and how much of the source was read."""

    reading: Reading
    documents: int = 0
    tokens: int = 0
    bytes: int = 0


def prepare(
    corpus: str,
    target: Path,
    tokenizer: Tokenizer,
    *,
    kind: Kind = "text",
    text_field: str = "text",
    split: str = "train",
    validation_fraction: float = 0.05,
    shard_tokens: int = 100_000_000,
    watch: Callable[[Preparation], None] = lambda _: None,
) -> Manifest:
    """Write the shards of `corpus` to the new directory `target`; `watch` is called after each document.

    Documents are streamed: in memory are a few of them and 24 bytes for each. The held-out ones are those that
    `undertow.data.division.split` takes from the same corpus. Raises `InputError` for bad input or a target that
    exists, `UndertowError` where writing fails; no `target` is there then.
    """
    _check(corpus, kind, text_field, split, validation_fraction, shard_tokens)
    done = Preparation(Reading())
    keys, sizes, tokens = array("Q"), array("q"), array("q")  # of each document
    with new_directory(target) as fresh:
        with ShardWriter(fresh, tokenizer.vocab_size, kind == "chat", shard_tokens) as writer:
            examples, alone = _examples(corpus, tokenizer, kind, text_field, split, validation_fraction, done.reading)
            for example in examples:
                writer.add(example)
                keys.append(example.key)
                sizes.append(example.size)
                tokens.append(len(example.ids))
                done.documents += 1
                done.tokens += len(example.ids)
                done.bytes += example.size
                watch(done)
        drawn = np.array([False, True]) if alone else held_out(np.array(keys), np.array(sizes), validation_fraction)
        write_synced(fresh / HELD_OUT, np.flatnonzero(drawn).astype("<i8").tobytes())
        tokenizer.save(fresh / TOKENIZER)
        manifest = Manifest(
            kind=kind,
            corpus=corpus.encode("utf-8", "replace").decode(),  # a file name may be no UTF-8
            tokenizer=_facts(tokenizer),
            dtype=writer.dtype.name,  # type: ignore[arg-type]
            validation_fraction=validation_fraction,
            training=_side(~drawn, np.array(tokens), np.array(sizes)),
            validation=_side(drawn, np.array(tokens), np.array(sizes)),
            held_out=FileFacts.of(fresh / HELD_OUT),
            shards=writer.shards,
        )
        write_synced(fresh / MANIFEST, manifest.to_json().encode())
    return manifest


def _check(corpus: str, kind: Kind, text_field: str, split: str, validation_fraction: float, shard_tokens: int) -> None:
    check_fraction(validation_fraction)
    if shard_tokens < 1:
        raise InputError(f"shard_tokens {shard_tokens} must be at least 1")
    if (Path(corpus) / MANIFEST).is_file():
        raise InputError(f"corpus '{corpus}' is a directory of prepared shards already")
    if split != "train" and not corpus.startswith(HUB):
        raise InputError(f"split '{split}': corpus '{corpus}' has no splits, only hf:NAME has; leave it out")
    if text_field != "text" and kind == "chat":
        raise InputError(f"text_field '{text_field}': kind chat reads prompt and response, or messages; leave it out")


def _facts(tokenizer: Tokenizer) -> TokenizerFacts:
    return TokenizerFacts(
        identity=tokenizer.identity,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
    )


def _side(chosen: np.ndarray, tokens: np.ndarray, sizes: np.ndarray) -> Side:
    return Side(documents=int(chosen.sum()), tokens=int(tokens[chosen].sum()), bytes=int(sizes[chosen].sum()))


def _examples(
    corpus: str, tokenizer: Tokenizer, kind: Kind, text_field: str, split: str, fraction: float, reading: Reading
) -> tuple[Iterator[Example], bool]:
    """The documents of a corpus, and whether they are the two parts of a single one."""
    if kind == "chat":
        return encode_conversations(read_conversations(corpus, split, reading), tokenizer), False
    documents = read_documents(corpus, text_field, split, reading)
    first, second = next(documents), next(documents, None)
    if second is None:
        return encode_documents(cut(first, fraction), tokenizer), True
    return encode_documents(chain((first, second), documents), tokenizer), False
