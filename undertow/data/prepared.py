"""Prepared shards as a run reads them: memory-mapped, their sizes and digests checked first."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from undertow.config.errors import InputError
from undertow.data.manifest import HELD_OUT, MANIFEST, FileFacts, Manifest, ShardFacts, file_digest
from undertow.data.store import Part, TokenStore

WHOLE = 1 << 30
"""Bytes of token files up to which every byte is checked: a second or two. Beyond it a sample of each file is."""


def is_prepared(corpus: str) -> bool:
    """Whether `corpus` is a directory of prepared shards."""
    return (Path(corpus) / MANIFEST).is_file()


def open_shards(directory: Path, manifest: Manifest, whole: int = WHOLE) -> tuple[TokenStore, TokenStore]:
    """(training, held-out) documents of the shards that `manifest` describes.

    Sizes of all files, and all of the offsets and the division, are always checked. So is every byte of tokens and
    masks where they hold at most `whole` bytes together; beyond that 1 MiB of each file is, spread over it. Raises
    `InputError` for a file that is missing, cut short or changed.
    """
    size = sum(facts.bytes for shard in manifest.shards for facts in shard.files.values())
    sample = size > whole
    parts = [_part(directory, manifest, shard, sample) for shard in manifest.shards]
    _check(directory / HELD_OUT, manifest.held_out, sample=False)
    documents = sum(shard.documents for shard in manifest.shards)
    chosen = np.fromfile(directory / HELD_OUT, dtype="<i8")
    drawn = np.zeros(documents, dtype=bool)
    sides = manifest.training.documents, manifest.validation.documents
    if len(chosen) and 0 <= chosen.min() <= chosen.max() < documents:
        drawn[chosen] = True
    if sides != (int((~drawn).sum()), int(drawn.sum())) or 0 in sides:
        raise InputError(f"{directory}: the division does not fit its {documents} documents; prepare the shards again")
    training, validation = (
        TokenStore(parts, np.flatnonzero(side), f"{manifest.content} {name}")
        for side, name in ((~drawn, "training"), (drawn, "held out"))
    )
    return training, validation


def _part(directory: Path, manifest: Manifest, shard: ShardFacts, sample: bool) -> Part:
    wanted = {"tokens", "offsets"} | ({"learned"} if manifest.kind == "chat" else set())
    if set(shard.files) != wanted:
        raise InputError(
            f"{directory / MANIFEST}: {shard.name} has the files {', '.join(sorted(shard.files))}, those of kind "
            f"{manifest.kind} are {', '.join(sorted(wanted))}; prepare the shards again"
        )
    paths = {kind: directory / f"{shard.name}.{kind}" for kind in shard.files}
    for kind, facts in shard.files.items():
        _check(paths[kind], facts, sample and kind != "offsets")
    offsets = np.fromfile(paths["offsets"], dtype="<i8")
    tokens = np.memmap(paths["tokens"], dtype=manifest.token_dtype, mode="r")
    learned = np.memmap(paths["learned"], dtype=bool, mode="r") if "learned" in paths else None
    ends = (len(offsets) - 1, int(offsets[0]), int(offsets[-1]), len(tokens))
    if ends != (shard.documents, 0, shard.tokens, shard.tokens) or (np.diff(offsets) < 1).any():
        raise InputError(f"{paths['offsets']}: does not fit the tokens of {shard.name}; prepare the shards again")
    if learned is not None and len(learned) != len(tokens):
        raise InputError(f"{paths['learned']}: does not fit the tokens of {shard.name}; prepare the shards again")
    return Part(tokens, offsets, learned)


def _check(path: Path, facts: FileFacts, sample: bool) -> None:
    if not path.is_file():
        raise InputError(f"{path}: is missing; prepare the shards again")
    size = path.stat().st_size
    if size != facts.bytes:
        raise InputError(f"{path}: has {size} bytes, {facts.bytes} were prepared; prepare the shards again")
    if file_digest(path, sample) != (facts.sample if sample else facts.digest):
        raise InputError(f"{path}: was changed after it was prepared (its digest differs); prepare the shards again")
