"""Pipeline layouts: one parser, one canonical spelling, and the check against a model.

A layout spells the stages of a pipeline from the first to the last, parted by `|`. In a stage stand `E` (embedding),
`t` (decoder layer), `m` (MTP block) and `L` (loss with its output head). `x*n` repeats the letter before the star,
`(...)*n` repeats a group, which may contain `|`; commas mean nothing. The list form, a list of lists of `embedding`,
`decoder`, `mtp` and `loss`, says the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.parallel import Schedule

Placement = Literal["wrap", "fold"]
"""Where stage k lives on p ranks: `wrap` is rank k mod p, chunk k div p; `fold` puts stage 2p-1-k beside stage k."""

NAMES = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_LETTERS = {name: letter for letter, name in NAMES.items()}
_MOST = 10_000


class _Item(NamedTuple):
    letter: str
    where: str


@dataclass(frozen=True)
class Layout:
    """Stages in the order of the model, each its letters written out: `("Ett", "tmL")`. Made by `parse_layout`."""

    stages: tuple[str, ...]

    def __str__(self) -> str:
        """The canonical spelling: repetitions as `x*n`, no groups, no commas."""
        return "|".join("".join(_run(letter, len([*same])) for letter, same in groupby(s)) for s in self.stages)

    def lists(self) -> list[list[str]]:
        """The list form."""
        return [[NAMES[letter] for letter in stage] for stage in self.stages]

    def counts(self, letter: str) -> tuple[int, ...]:
        """How often a letter stands in each stage."""
        return tuple(stage.count(letter) for stage in self.stages)

    def layers(self, stage: int) -> range:
        """Decoder layers of a stage by their number in the model."""
        return self._ranges[0][stage]

    def mtp_blocks(self, stage: int) -> range:
        """MTP blocks of a stage by their number: they follow the decoder layers."""
        return self._ranges[1][stage]

    @cached_property
    def _ranges(self) -> tuple[list[range], list[range]]:
        """Decoder layers and MTP blocks of every stage."""
        ends = [*accumulate((*self.counts("t"), *self.counts("m")), initial=0)]
        found = [range(*pair) for pair in pairwise(ends)]
        return found[: len(self.stages)], found[len(self.stages) :]


def _run(letter: str, times: int) -> str:
    return letter if times == 1 else f"{letter}*{times}"


def layout_of(layers: Sequence[int], mtp_blocks: int = 1) -> Layout:
    """The layout with so many decoder layers on each stage, embedding first, MTP blocks and loss last."""
    body = ["t" * count for count in layers]
    body[0] = f"E{body[0]}"
    body[-1] += "m" * mtp_blocks + "L"
    if "" in body:
        raise ConfigError(f"layers by stage {list(layers)}: stage {body.index('')} is empty; a stage has at least 1")
    return Layout(tuple(body))


def spread_evenly(config: ModelConfig, ranks: int, chunks: int) -> Layout:
    """The layout of a model on `chunks` stages of each of `ranks` pipeline ranks, layers as equal as possible: the
    first stages have one fewer, the last has MTP block and head.

    Raises `ConfigError` for more stages than layers.
    """
    stages, layers = ranks * chunks, config.num_hidden_layers
    if stages > layers:
        raise ConfigError(
            f"{stages} stages ({ranks} pipeline ranks, {chunks} each) exceed the {layers} layers of the model: every "
            "stage needs a layer"
        )
    each, left = divmod(layers, stages)
    counts = [each + (stage >= stages - left) for stage in range(stages)]
    return layout_of(counts, config.num_nextn_predict_layers)


def parse_layout(layout: str | Sequence[Sequence[str]]) -> Layout:
    """Read a layout in either form.

    Raises `ConfigError`, with the place and what may stand there: for other letters, for a repetition that repeats
    nothing, for an empty stage, unless `E` stands once and first, `L` once and last, and all `m` after the last `t` in
    one stage.
    """
    if isinstance(layout, str):
        told = f"layout {layout!r}" if len(layout) <= 100 else f"layout {layout[:100]!r}..."
        items, end = _spell(layout, told), f"column {len(layout) + 1}"
    else:
        told, items = "layout", []
        items = list(_listed(layout, told))
        end = f"at [{len(layout) - 1}]"
    if not items:
        raise ConfigError(f"{told} is empty; it is written such as Et*10|t*12|t*12|t*9mL")
    _check_order(items, end, told)
    return Layout(tuple("".join(item.letter for item in items).split("|")))


def _refuse(told: str, where: str, problem: str) -> ConfigError:
    return ConfigError(f"{told}, {where}: {problem}")


def _listed(stages: Sequence[Sequence[str]], told: str) -> Iterator[_Item]:
    for number, stage in enumerate(stages):
        if isinstance(stage, str) or not isinstance(stage, Sequence):
            raise _refuse(told, f"at [{number}]", f"a stage is a list of {', '.join(_LETTERS)}; this is {stage!r}")
        if number:
            yield _Item("|", f"at [{number - 1}]")
        for place, name in enumerate(stage):
            where = f"at [{number}][{place}]"
            if not isinstance(name, str) or name not in _LETTERS:
                raise _refuse(told, where, f"{name!r} is none of {', '.join(_LETTERS)}")
            yield _Item(_LETTERS[name], where)


def _spell(text: str, told: str) -> list[_Item]:
    """Write repetitions and groups out; each item keeps the column it was written in."""
    marks = [(mark, f"column {column}") for column, mark in enumerate(text, 1) if mark != ","]
    marks.append(("", f"column {len(text) + 1}"))
    items: list[_Item] = []
    group: tuple[int, str] | None = None
    at = 0
    while marks[at][0]:
        mark, where = marks[at]
        start = len(items)
        at += 1
        if mark in NAMES or mark == "|":
            items.append(_Item(mark, where))
            if mark == "|" or marks[at][0] != "*":
                continue
        elif mark == "(":
            if group:
                raise _refuse(told, where, f"a group inside the group of {group[1]}; groups do not nest")
            group = (start, where)
            continue
        elif mark == ")":
            if not group:
                raise _refuse(told, where, "')' closes no group; a group is written (...)*n")
            start, group = group[0], None
            if start == len(items):
                raise _refuse(told, where, "the group is empty; it repeats letters and '|'")
        elif mark == "*":
            raise _refuse(
                told, where, "'*' repeats the one letter or the group before it; nothing to repeat stands here"
            )
        else:
            raise _refuse(told, where, f"{mark!r} is none of the letters E, t, m, L nor of the signs | * ( ) ,")
        times, at = _times(marks, at, told)
        if len(items) + (len(items) - start) * (times - 1) > _MOST:
            raise _refuse(told, where, f"repeated {times} times is more than the {_MOST} items that a layout may have")
        items[start:] = items[start:] * times
    if group:
        raise _refuse(told, group[1], "the group is not closed; a group is written (...)*n")
    return items


def _times(marks: list[tuple[str, str]], at: int, told: str) -> tuple[int, int]:
    """The n of `*n` at this place, and the place after it."""
    if marks[at][0] != "*":
        raise _refuse(told, marks[at][1], "a group is followed by '*' and how often it stands; n is at least 1")
    first = at = at + 1
    while marks[at][0] and marks[at][0] in "0123456789":
        at += 1
    digits = "".join(mark for mark, _ in marks[first:at])
    if not digits.strip("0"):
        given = f"{digits} was given" if digits else "no number stands here"
        raise _refuse(told, marks[first][1], f"'*' is followed by a number of at least 1; {given}")
    if len(digits) > 6:
        raise _refuse(told, marks[first][1], f"a layout has at most {_MOST} items; a number of {len(digits)} digits")
    return int(digits), at


def _check_order(items: list[_Item], end: str, told: str) -> None:
    previous = "|"
    for item in [*items, _Item("|", end)]:
        if item.letter == previous == "|":
            raise _refuse(told, item.where, "the stage that ends here is empty; a stage has at least one of E, t, m, L")
        previous = item.letter
    last_t = max((at for at, item in enumerate(items) if item.letter == "t"), default=-1)
    home: int | None = None
    stage = 0
    for at, (letter, where) in enumerate(items):
        stage += letter == "|"
        if (letter == "E") != (at == 0):
            raise _refuse(told, where, f"{NAMES[letter]} {letter}; the embedding E stands once, as the very first item")
        if (letter == "L") != (at == len(items) - 1):
            raise _refuse(told, where, f"{NAMES[letter]} {letter}; the loss L stands once, as the very last item")
        if letter == "m":
            if at < last_t:
                raise _refuse(told, where, "an MTP block m before a decoder layer t; every m comes after the last t")
            if home not in (None, stage):
                raise _refuse(
                    told, where, f"an MTP block m on stage {stage}, others on stage {home}; one stage has all"
                )
            home = stage


def placement_of(schedule: Schedule) -> Placement:
    """How a schedule lays stages over ranks."""
    return "fold" if schedule == "zbv" else "wrap"


def place(stage: int, ranks: int, placement: Placement) -> tuple[int, int]:
    """Rank and chunk of a stage."""
    chunk, rank = divmod(stage, ranks)
    return (ranks - 1 - rank if placement == "fold" and chunk == 1 else rank), chunk


def check_layout(layout: Layout, config: ModelConfig, ranks: int, placement: Placement = "wrap") -> int:
    """Hold a layout against a model and a number of pipeline ranks; returns the chunks that each rank has.

    Raises `ConfigError` unless the layout has the model's layers and MTP blocks, a multiple of `ranks` stages (exactly
    twice `ranks` where it is folded), and its MTP blocks in the last chunk of their rank.
    """
    told, stages = f"layout '{layout}'", len(layout.stages)
    for letter, needed in (("t", config.num_hidden_layers), ("m", config.num_nextn_predict_layers)):
        if (found := sum(layout.counts(letter))) != needed:
            by_stage = ", ".join(map(str, layout.counts(letter)))
            raise _refuse(
                told, f"stages 0 to {stages - 1}", f"{found} {letter} ({by_stage} by stage); the model has {needed}"
            )
    if stages % ranks:
        allowed = f"the number of stages is a multiple of the {ranks} pipeline ranks"
        raise _refuse(told, f"after stage {stages - 1}", f"{stages} stages; {allowed}")
    chunks = stages // ranks
    if placement == "fold" and chunks != 2:
        allowed = f"a folded schedule has 2 stages a rank, {2 * ranks} for {ranks} ranks"
        raise _refuse(told, f"after stage {stages - 1}", f"{stages} stages; {allowed}")
    for stage, blocks in enumerate(layout.counts("m")):
        rank, chunk = place(stage, ranks, placement)
        if blocks and chunk != chunks - 1:
            allowed = f"MTP blocks are in the last chunk of their rank, so on stages {stages - ranks} to {stages - 1}"
            raise _refuse(told, f"stage {stage}", f"m is in chunk {chunk} of rank {rank}; {allowed}")
    return chunks
