"""Prepared shards as a run reads them: memory-mapped, their sizes and digests checked first."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from undertow.config.errors import InputError
from undertow.data.manifest import HELD_OUT, MANIFEST, PIECE, PIECES, FileFacts, Manifest, ShardFacts, file_digest
from undertow.data.mapped import MappedNumbers, Mapping, mapping
from undertow.data.store import Part, TokenStore

AGAIN = "prepare the shards again"
WHOLE = 1 << 30
"""Bytes of token files up to which every byte is checked: a second or two. Beyond it a sample of each file is."""


def is_prepared(corpus: str) -> bool:
    """Whether `corpus` is a directory of prepared shards."""
    return os.path.isfile(Path(corpus) / MANIFEST)  # unlike Path.is_file false for a name that is too long


def open_shards(directory: Path, manifest: Manifest, whole: int = WHOLE) -> tuple[TokenStore, TokenStore]:
    """(training, held-out) documents of the shards that `manifest` describes.

    Sizes of all files, and all of the offsets and the division, are always checked. So is every byte of tokens and
    masks where they hold at most `whole` bytes together; beyond that 1 MiB of each file is, spread over it. Raises
    `InputError` for a file that is missing, cut short or changed, or does not fit the manifest.
    """
    size = sum(facts.bytes for shard in manifest.shards for facts in shard.files.values())
    sample = size > whole
    mapped = mapping()
    parts = [_part(directory, manifest, shard, sample, mapped) for shard in manifest.shards]
    _check(directory / HELD_OUT, manifest.held_out, sample=False)
    documents = sum(shard.documents for shard in manifest.shards)
    chosen = np.fromfile(directory / HELD_OUT, dtype="<i8")
    drawn = np.zeros(documents, dtype=bool)
    sides = manifest.training.documents, manifest.validation.documents
    if len(chosen) and 0 <= chosen.min() <= chosen.max() < documents:
        drawn[chosen] = True
    fits = manifest.held_out.bytes == chosen.nbytes and sides == (int((~drawn).sum()), int(drawn.sum()))
    if not fits or 0 in sides:
        raise InputError(f"{directory}: the division does not fit its {documents} documents; {AGAIN}")
    training, validation = (
        TokenStore(parts, np.flatnonzero(side), f"{manifest.content} {name}")
        for side, name in ((~drawn, "training"), (drawn, "held out"))
    )
    if (training.tokens, validation.tokens) != (manifest.training.tokens, manifest.validation.tokens):
        raise InputError(f"{directory / MANIFEST}: its counts of tokens are not those of the shards; {AGAIN}")
    return training, validation


def _part(directory: Path, manifest: Manifest, shard: ShardFacts, sample: bool, mapped: Mapping) -> Part:
    wanted = {"tokens", "offsets"} | ({"learned"} if manifest.kind == "chat" else set())
    if set(shard.files) != wanted:
        raise InputError(
            f"{directory / MANIFEST}: {shard.name} has the files {', '.join(sorted(shard.files))}, those of kind "
            f"{manifest.kind} are {', '.join(sorted(wanted))}; {AGAIN}"
        )
    paths = {kind: directory / f"{shard.name}.{kind}" for kind in shard.files}
    each = manifest.token_dtype.itemsize
    sizes = {"offsets": 8 * (shard.documents + 1), "tokens": each * shard.tokens, "learned": shard.tokens}
    for kind, facts in shard.files.items():
        if facts.bytes != sizes[kind]:
            raise InputError(
                f"{paths[kind]}: {facts.bytes} bytes do not fit {shard.documents} documents of {shard.tokens} tokens "
                f"in all; {AGAIN}"
            )
        _check(paths[kind], facts, sample and kind != "offsets")
    offsets = np.fromfile(paths["offsets"], dtype="<i8")
    if (offsets[0], offsets[-1]) != (0, shard.tokens) or (np.diff(offsets) < 1).any():
        raise InputError(f"{paths['offsets']}: does not fit the tokens of {shard.name}; {AGAIN}")
    tokens = MappedNumbers(paths["tokens"], manifest.token_dtype, shard.tokens, mapped)
    largest = _largest(tokens, sample)
    if largest >= manifest.tokenizer.vocab_size:
        raise InputError(
            f"{paths['tokens']}: token id {largest} is outside the vocabulary of {manifest.tokenizer.vocab_size}; "
            f"{AGAIN}"
        )
    learned = MappedNumbers(paths["learned"], np.dtype(bool), shard.tokens, mapped) if "learned" in paths else None
    return Part(tokens, offsets, learned)


def _largest(tokens: MappedNumbers, sample: bool) -> int:
    """The largest id: of all tokens, or of as many places as a sample takes."""
    last = max(len(tokens) - PIECE, 0)
    starts = [last * place // (PIECES - 1) for place in range(PIECES)] if sample else range(0, len(tokens), PIECE)
    return max(int(tokens[start : start + PIECE].max()) for start in starts)


def _check(path: Path, facts: FileFacts, sample: bool) -> None:
    if not path.is_file():
        raise InputError(f"{path}: is missing; {AGAIN}")
    size = path.stat().st_size
    if size != facts.bytes:
        raise InputError(f"{path}: has {size} bytes, {facts.bytes} were prepared; {AGAIN}")
    if file_digest(path, sample) != (facts.sample if sample else facts.digest):
        raise InputError(f"{path}: was changed after it was prepared (its digest differs); {AGAIN}")
