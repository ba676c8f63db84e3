"""Which files a checkpoint of several ranks has, where each tensor lies in them, and which rank writes which rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from undertow.checkpoint.header import outline, size_of
from undertow.checkpoint.shards import SHARD_BYTES, divide, index_text, shard_names
from undertow.config.errors import UndertowError
from undertow.config.spelling import some

STEMS = "model", "optimizer"
"""Names of the files' two kinds, without endings."""


class Holding(NamedTuple):
    """Rows of a tensor that a rank holds: kind of file, name, header's type, first row, rows, shape of the whole."""

    stem: str
    name: str
    dtype: str
    first: int
    rows: int
    whole: tuple[int, ...]

    @classmethod
    def of(cls, said: list[Any]) -> Holding:
        """The same, from the list that JSON made of it."""
        *rest, whole = said
        return cls._make((*rest, tuple(whole)))


class Task(NamedTuple):
    """What a rank writes: the tensor that it holds, the file, and the byte where its first row belongs."""

    stem: str
    name: str
    file: str
    offset: int


class Arrangement(NamedTuple):
    """The first bytes and the size of every file, texts of the indices, names of the optimizer's tensors in order, and
    the tasks of every rank.

    Files are the same for all layouts whose ranks together hold the same tensors.
    """

    files: dict[str, tuple[bytes, int]]
    indices: dict[str, str]
    optimizer: list[str]
    tasks: list[list[Task]]


def arrange(held: Sequence[Sequence[Holding]], order: Iterable[str], shard_bytes: int = SHARD_BYTES) -> Arrangement:
    """From what each rank holds, to files of at most `shard_bytes` (but one tensor is in one) and who writes them.

    What several ranks hold is written by the one that has least to write. `order` are the names of weights, all of
    them; optimizer state follows the weight that begins its name. Raises `UndertowError` where the ranks do not hold
    every row of a tensor, or contradict each other.
    """
    found: dict[tuple[str, str], Holding] = {}
    holders: dict[tuple[str, str], dict[tuple[int, int], list[int]]] = {}
    for rank, holdings in enumerate(held):
        for each in holdings:
            key = each.stem, each.name
            known = found.setdefault(key, each)
            if (known.dtype, known.whole) != (each.dtype, each.whole):
                raise UndertowError(
                    f"{each.name}: rank {rank} holds {each.dtype} of {list(each.whole)}, another rank {known.dtype} of "
                    f"{list(known.whole)}"
                )
            if each.rows:
                holders.setdefault(key, {}).setdefault((each.first, each.rows), []).append(rank)
    weights = list(order)
    lacking = [name for name in weights if ("model", name) not in found]
    if lacking:
        raise UndertowError(f"{len(lacking)} tensors ({some(lacking)}) are held by no rank")
    places = {name: i for i, name in enumerate(weights)}
    keys = sorted(found, key=lambda key: places.get(key[1].partition("/")[0], len(places)))  # stable: parts in turn
    tasks: list[list[Task]] = [[] for _ in held]
    loads = [0] * len(held)
    files, indices = {}, {}
    for stem in STEMS:
        here = [found[key] for key in keys if key[0] == stem]
        sizes = [size_of(each.dtype, each.whole) for each in here]
        shards = divide(sizes, shard_bytes)
        names = shard_names(stem, len(shards))
        for file, shard in zip(names, shards, strict=True):
            inside = here[shard.start : shard.stop]
            head, size, offsets = outline((each.name, each.dtype, each.whole) for each in inside)
            files[file] = head, size
            for each in inside:
                _deal(each, holders.get((stem, each.name), {}), file, offsets[each.name], tasks, loads)
        if len(shards) > 1:
            weight_map = {here[i].name: file for file, shard in zip(names, shards, strict=True) for i in shard}
            indices[f"{stem}.safetensors.index.json"] = index_text(weight_map, sum(sizes))
    return Arrangement(files, indices, sorted(name for stem, name in keys if stem == "optimizer"), tasks)


def _deal(
    each: Holding,
    holders: dict[tuple[int, int], list[int]],
    file: str,
    offset: int,
    tasks: list[list[Task]],
    loads: list[int],
) -> None:
    """Give every row of a tensor to one rank."""
    rows = each.whole[0] if each.whole else 1
    row_bytes = size_of(each.dtype, each.whole) // max(rows, 1)
    at = 0
    for (first, count), ranks in sorted(holders.items()):
        if first != at:
            raise UndertowError(f"{each.name}: the ranks hold rows up to {at} and from {first} on of {rows}")
        rank = min(ranks, key=lambda rank: loads[rank])
        tasks[rank].append(Task(each.stem, each.name, file, offset + first * row_bytes))
        loads[rank] += count * row_bytes
        at += count
    if at != rows:
        raise UndertowError(f"{each.name}: the ranks hold {at} of {rows} rows")
