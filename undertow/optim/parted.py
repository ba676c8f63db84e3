"""Muon on matrices that lie in parts over ranks: each is brought together for its iteration alone, on one rank.

Momenta and weights stay where they are; directions travel to the rank that iterates, updates travel back, both in the
type of the iteration. Every rank makes the same plan from shapes and takes part in the same exchanges.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.ops.reference.precision import wide
from undertow.optim.host import BESIDE, Keeper, Load
from undertow.optim.muon import IN_PLACE, MOMENTUM, UPDATE_RMS, iteration_type
from undertow.optim.orthogonal import orthogonalise
from undertow.optim.part import Part, workspace
from undertow.optim.pieces import apply_all, directions
from undertow.parallel.held import rows_of


class Parted(NamedTuple):
    """A stored tensor `[rows, width]` over all ranks of an axis, the `part` of it here, which may be empty, and the
    heights of the matrices that it consists of."""

    part: Part
    rows: int
    width: int
    heights: tuple[int, ...]


class Place(NamedTuple):
    """A matrix `[height, width]` of the `tensor`-th tensor, from row `top` on: `rows` of it lie on each rank, and
    `owner` iterates on it."""

    tensor: int
    top: int
    height: int
    width: int
    rows: tuple[int, ...]
    owner: int

    @property
    def size(self) -> int:
        """Numbers in the matrix."""
        return self.height * self.width

    @property
    def work(self) -> int:
        """What an iteration costs, in multiplications of scalars."""
        return self.size * min(self.height, self.width)

    def of(self, rank: int) -> int:
        """Numbers of the matrix that lie on a rank."""
        return self.rows[rank] * self.width


Shape = tuple[int, int, tuple[int, ...]]  # rows, width, heights


@lru_cache(maxsize=64)
def plan(shapes: tuple[Shape, ...], ranks: int, most: int) -> tuple[tuple[Place, ...], ...]:
    """Rounds of matrices in which no rank iterates on more than `most` numbers at once, unless on one matrix alone.

    A matrix that lies on one rank stays there. The others go to the rank with the least to do, those with most work
    first. Within a round, matrices of a rank follow each other.
    """
    places = [place for number, shape in enumerate(shapes) for place in _places(number, *shape, ranks)]
    load = [0] * ranks
    for place in places:
        if place.owner >= 0:
            load[place.owner] += place.work
    heap = [(work, rank) for rank, work in enumerate(load)]
    heapq.heapify(heap)
    dealt = []
    for place in sorted(places, key=lambda place: -place.work):
        if place.owner < 0:
            work, rank = heap[0]
            heapq.heapreplace(heap, (work + place.work, rank))
            place = place._replace(owner=rank)
        dealt.append(place)
    rounds: list[list[Place]] = []
    number, filled = [0] * ranks, [0] * ranks
    for place in dealt:
        rank = place.owner
        if filled[rank] and filled[rank] + place.size > most:
            number[rank], filled[rank] = number[rank] + 1, 0
        filled[rank] += place.size
        rounds += [[] for _ in range(number[rank] + 1 - len(rounds))]
        rounds[number[rank]].append(place)
    return tuple(tuple(sorted(each, key=lambda place: place.owner)) for each in rounds)


def _places(number: int, rows: int, width: int, heights: tuple[int, ...], ranks: int) -> list[Place]:
    """Matrices of a tensor; the owner is -1 where it is yet to be found."""
    places, top, on = [], 0, rows_of(rows, ranks)
    for height in heights:
        parts = tuple(len(range(max(top, each.start), min(top + height, each.stop))) for each in on)
        owner = parts.index(height) if height in parts else -1
        places.append(Place(number, top, height, width, parts, owner))
        top += height
    return places


def parted_step(
    tensors: list[Parted],
    group: dist.ProcessGroup,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    dtype: torch.dtype | None = None,
    keeper: Keeper = BESIDE,
) -> None:
    """`muon_step` on tensors that lie in parts, row after row, over the ranks of `group`; every rank must call it with
    its parts of the same tensors.

    While one round is iterated on, the directions of the next and the updates of the last are on their way.
    """
    if not tensors:
        return
    like = tensors[0].part.weight
    dtype = dtype or iteration_type(wide(like[:0]))
    shapes = tuple((each.rows, each.width, each.heights) for each in tensors)
    most = IN_PLACE * workspace(like.device)
    planned = plan(shapes, dist.get_world_size(group), most)
    rounds = [_Round(places, tensors, group, dtype, keeper) for places in planned]
    rounds[0].fetch_momenta()
    for i in range(len(rounds) + 2):
        if i < len(rounds):
            rounds[i].send(momentum)
        if i + 1 < len(rounds):
            rounds[i + 1].fetch_momenta()
        if 1 <= i <= len(rounds):
            rounds[i - 1].iterate()
        if i >= 2:
            rounds[i - 2].apply(lr, weight_decay)


class _Round:
    """Matrices of a round and what of them is on its way, one exchange at a time."""

    def __init__(
        self,
        places: tuple[Place, ...],
        tensors: list[Parted],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        keeper: Keeper,
    ) -> None:
        self._places, self._group, self._dtype, self._keeper = places, group, dtype, keeper
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._own = [place for place in places if place.owner == self._rank]
        self._parts = [self._cut(place, tensors[place.tensor]) for place in places]
        self._here, self._there = [0] * self._ranks, [0] * self._ranks  # numbers that each owner gets, each rank has
        for place in places:
            self._here[place.owner] += place.of(self._rank)
        for place in self._own:
            self._there = [many + place.of(rank) for rank, many in enumerate(self._there)]

    def _cut(self, place: Place, tensor: Parted) -> Part:
        first = max(0, place.top - rows_of(tensor.rows, self._ranks)[self._rank].start)
        return tensor.part.cut(lambda t: t[first : first + place.rows[self._rank]])

    def _fetch(self, wanted: Callable[[str], bool]) -> Load:
        """Of the parts that have rows here, and of their state what is wanted."""
        parts = [part for part in self._parts if part.weight.numel()]
        return self._keeper.fetch(
            [part._replace(state={key: t for key, t in part.state.items() if wanted(key)}) for part in parts]
        )

    def fetch_momenta(self) -> None:
        """Start to bring what `send` needs."""
        self._load = self._fetch(lambda key: key == MOMENTUM)

    def send(self, momentum: float) -> None:
        """Bring the momenta here up to date and start the directions on their way to the owners."""
        moved = directions(self._keeper.arrive(self._load), momentum, self._dtype)
        self._keeper.give_back(self._load)
        self._start(moved, self._here, self._there)

    def iterate(self) -> None:
        """Orthogonalise the matrices of this rank as they have arrived, and start the updates on their way back."""
        self._work.wait()
        sizes = [place.of(rank) for rank in range(self._ranks) for place in self._own]
        pieces, many = self._buffer.split(sizes), len(self._own)
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, place in enumerate(self._own):
            alike[min(place.height, place.width), max(place.height, place.width)].append(i)
        updates = {}
        for numbers in alike.values():
            wholes = []
            for i in numbers:
                whole = torch.cat(pieces[i::many]).view(self._own[i].height, self._own[i].width)
                wholes.append(whole if whole.shape[0] <= whole.shape[1] else whole.mT)
            for i, update in zip(numbers, orthogonalise(wide(torch.stack(wholes)), self._dtype), strict=True):
                updates[i] = update if self._own[i].height <= self._own[i].width else update.mT
        cuts = [updates[i].split(place.rows) for i, place in enumerate(self._own)]
        back = chain.from_iterable(zip(*cuts, strict=True))  # rank after rank
        self._start(list(back), self._there, self._here)
        self._load = self._fetch(lambda key: key != MOMENTUM)

    def apply(self, lr: float, weight_decay: float) -> None:
        """Bring the weights here up to date once the updates are back."""
        self._work.wait()
        places = [place for place in self._places if place.of(self._rank)]
        updates = self._buffer.split([place.of(self._rank) for place in places])
        rates = [lr * UPDATE_RMS * math.sqrt(max(place.height, place.width)) for place in places]
        apply_all(self._keeper.arrive(self._load), list(updates), rates, 1 - lr * weight_decay)
        self._keeper.give_back(self._load)
        del self._buffer, self._sent, self._load

    def _start(self, tensors: list[Tensor], send: list[int], receive: list[int]) -> None:
        device = self._parts[0].weight.device
        flat = [tensor.to(self._dtype).flatten() for tensor in tensors]
        self._sent = torch.cat(flat) if flat else torch.empty(0, dtype=self._dtype, device=device)
        self._buffer = torch.empty(sum(receive), dtype=self._dtype, device=device)
        work = dist.all_to_all_single(self._buffer, self._sent, receive, send, group=self._group, async_op=True)
        assert work is not None  # only for a rank outside the group
        self._work = work
