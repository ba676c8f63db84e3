"""From `[batch, sequence]` arguments to documents end to end, and back: padding, packing and positions become
segments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.ops.segments import Segments


@dataclass(frozen=True)
class Batch:
    """Tokens of a rectangular call without its padding: `ids [T]`, their documents, and where they came from."""

    ids: Tensor
    segments: Segments
    shape: tuple[int, int]
    place: Tensor | None

    def spread(self, rows: Tensor) -> Tensor:
        """`[T, ...] -> [B, S, ...]`, zeros at padding."""
        if self.place is None:
            return rows.view(*self.shape, *rows.shape[1:])
        full = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[1:])
        return full.index_copy(0, self.place, rows).view(*self.shape, *rows.shape[1:])


def _same_shape(name: str, value: Tensor, ids: Tensor) -> None:
    if value.shape != ids.shape:
        raise InputError(f"{name} has shape {list(value.shape)}; input_ids has {list(ids.shape)}: they must be equal")


def check_ids(ids: Tensor, vocabulary: int, attention_mask: Tensor | None = None) -> None:
    """Raise `InputError` for the first token id outside the vocabulary, with its place; padding may hold any."""
    wrong = (ids < 0) | (ids >= vocabulary)
    if attention_mask is not None:
        wrong &= attention_mask != 0
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise InputError(
            f"token id {int(ids[tuple(place)])} at {place} lies outside the vocabulary of {vocabulary} "
            f"(0 to {vocabulary - 1})"
        )


def _boundaries(rows: Tensor, segment_ids: Tensor | None, positions: Tensor | None, past: tuple[int, ...]) -> Tensor:
    """True where a token opens a document. All arguments flat, padding removed, on the host; `past` one per row."""
    first = torch.ones(len(rows), dtype=torch.bool)
    first[1:] = rows[1:] != rows[:-1]
    if segment_ids is not None:
        first[1:] |= segment_ids[1:] != segment_ids[:-1]
    if positions is None:
        return first
    follows = torch.zeros_like(first)
    follows[1:] = positions[1:] == positions[:-1] + 1
    if segment_ids is None:
        first |= ~follows
    start = torch.tensor(past, dtype=torch.int64)[rows]
    wrong = torch.where(first, positions != start, ~follows)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        want = int(start[at]) if first[at] else int(positions[at - 1]) + 1
        raise InputError(
            f"position {int(positions[at])} in row {int(rows[at])}: {want} was expected (positions of a "
            f"document count up by one from 0, or from the {int(start[at])} tokens its cache holds)"
        )
    return first


def flatten(
    ids: Tensor,
    vocabulary: int,
    attention_mask: Tensor | None = None,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    past: tuple[int, ...] | None = None,
) -> Batch:
    """Documents of `ids [B, S]` int64.

    `attention_mask [B, S]` is 1 at tokens, 0 at padding anywhere in a row. `segment_ids [B, S]`: a document is
    a run of equal ids within a row. `positions [B, S]` count up within a document and restart at each; they may stand
    in for `segment_ids`. `past` (one per row) are the tokens a cache holds; then each row is one document.
    Raises `InputError` for shapes, positions or token ids that do not fit.
    """
    if not isinstance(ids, Tensor):
        raise InputError(f"input_ids is a {type(ids).__name__}: a tensor [batch, sequence] of int64 is needed")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"input_ids has shape {list(ids.shape)} and type {ids.dtype}: [batch, sequence] of int64 is needed"
        )
    for name, value in (("attention_mask", attention_mask), ("positions", positions), ("segment_ids", segment_ids)):
        if value is not None:
            _same_shape(name, value, ids)
    if past is not None and len(past) != len(ids):
        raise InputError(f"input_ids has {len(ids)} rows; the cache holds {len(past)} sequences: they must be equal")
    if attention_mask is not None and not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise InputError(
            "attention_mask holds other values than 0 (padding) and 1 (token): additive masks are not taken"
        )
    place = None
    flat = ids.reshape(-1)
    if attention_mask is not None and not bool(attention_mask.all()):
        place = attention_mask.reshape(-1).nonzero()[:, 0]
        flat = flat[place]
    check_ids(ids, vocabulary, attention_mask)
    if place is None and positions is None and segment_ids is None:
        return Batch(
            flat, Segments.from_lengths((ids.shape[1],) * len(ids), past, ids.device), (len(ids), ids.shape[1]), None
        )

    def host(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.reshape(-1)
        return (x if place is None else x[place]).cpu()

    rows = (torch.arange(ids.numel()) if place is None else place.cpu()) // max(ids.shape[1], 1)
    first = _boundaries(rows, host(segment_ids), host(positions), past or (0,) * len(ids))
    if past is not None:
        counts = torch.bincount(rows, minlength=len(ids))
        if int(first.sum()) > int((counts > 0).sum()):
            raise InputError(
                "a row with a cache is one document: segment_ids and positions may not start another in it"
            )
        lengths = counts.tolist()
    else:
        edges = torch.cat([first.nonzero()[:, 0], torch.tensor([len(rows)])])
        lengths = edges.diff().tolist()
    return Batch(flat, Segments.from_lengths(lengths, past, ids.device), (len(ids), ids.shape[1]), place)
