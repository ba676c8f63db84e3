"""From a corpus to a directory of shards in one pass: encoded, written, divided and described."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from undertow.config.errors import InputError
from undertow.data.division import check_fraction
from undertow.data.examples import Kind, held_side, read_examples
from undertow.data.manifest import HELD_OUT, MANIFEST, TOKENIZER, FileFacts, Manifest, Side, TokenizerFacts
from undertow.data.prepared import is_prepared
from undertow.data.records import HUB, Reading
from undertow.data.shards import ShardWriter, new_directory, write_synced
from undertow.data.tokenizer import Tokenizer


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
            examples, parts = read_examples(
                corpus, tokenizer, kind, text_field, split, validation_fraction, done.reading
            )
            for example in examples:
                writer.add(example)
                keys.append(example.key)
                sizes.append(example.size)
                tokens.append(len(example.ids))
                done.documents += 1
                done.tokens += len(example.ids)
                done.bytes += example.size
                watch(done)
        drawn = held_side(keys, sizes, validation_fraction, parts)
        write_synced(fresh / HELD_OUT, np.flatnonzero(drawn).astype("<i8").tobytes())
        tokenizer.save(fresh / TOKENIZER)
        manifest = Manifest(
            kind=kind,
            corpus=corpus.encode("utf-8", "replace").decode(),  # a file name may be no UTF-8
            tokenizer=TokenizerFacts.of(tokenizer),
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
    if is_prepared(corpus):
        raise InputError(f"corpus '{corpus}' is a directory of prepared shards already")
    if split != "train" and not corpus.startswith(HUB):
        raise InputError(f"split '{split}': corpus '{corpus}' has no splits, only hf:NAME has; leave it out")
    if text_field != "text" and kind == "chat":
        raise InputError(f"text_field '{text_field}': kind chat reads prompt and response, or messages; leave it out")


def _side(chosen: np.ndarray, tokens: np.ndarray, sizes: np.ndarray) -> Side:
    return Side(documents=int(chosen.sum()), tokens=int(tokens[chosen].sum()), bytes=int(sizes[chosen].sum()))
