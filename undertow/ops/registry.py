"""Which backend serves an operator on a device, and why the others do not: one table, one rule."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from undertow.config.errors import InputError
from undertow.ops.reference import (
    attention,
    compress,
    cross_entropy,
    distillation,
    experts,
    hyper,
    indexer,
    linear,
    norm,
    rotary,
    router,
)

# Best first: the first backend that does not refuse is what `auto` takes.
BACKENDS = ("gluon", "triton", "reference")

REFERENCE: dict[str, Callable[..., Any]] = {
    "linear": linear.linear,
    "block_linear": linear.block_linear,
    "rms_norm": norm.rms_norm,
    "rotary": rotary.rotary,
    "sinkhorn": hyper.sinkhorn,
    "hyper_coefficients": hyper.hyper_coefficients,
    "hyper_collapse": hyper.hyper_collapse,
    "hyper_expand": hyper.hyper_expand,
    "compress_pool": compress.compress_pool,
    "indexer_scores": indexer.indexer_scores,
    "indexer_select": indexer.indexer_select,
    "sparse_attention": attention.sparse_attention,
    "indexer_distillation": distillation.indexer_distillation,
    "indexer_recall": distillation.indexer_recall,
    "route": router.route,
    "dispatch_order": experts.dispatch_order,
    "permute": experts.permute,
    "unpermute": experts.unpermute,
    "grouped_linear": experts.grouped_linear,
    "swiglu": experts.swiglu,
    "linear_cross_entropy": cross_entropy.linear_cross_entropy,
}
OPS = tuple(REFERENCE)

# Operators whose fast form may depend on the other rows of a call; they take `invariant`.
FIXED_ORDER = frozenset(
    ("linear", "block_linear", "compress_pool", "indexer_scores", "indexer_select", "sparse_attention",
    "indexer_distillation", "indexer_recall", "grouped_linear", "linear_cross_entropy") )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The backend of one operator on one device, and the reason each other one was refused."""

    op: str
    chosen: str
    refused: dict[str, str]


def refusal(op: str, backend: str, device: torch.device) -> str | None:
    """Why `backend` cannot serve `op` on `device`, or None if it can."""
    if backend == "reference":
        return None
    where = "a CPU" if device.type == "cpu" else "a GPU"
    return f"no {backend} kernel for {op} on {where} in this version"


def _check_name(kind: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise InputError(f"unknown {kind} '{name}'{hint} (known: {', '.join(known)})")


def choose(op: str, device: torch.device, wanted: str = "auto") -> Choice:
    """The backend for `op` on `device`. `wanted` names one, or `auto`.

    Raises `InputError` if the wanted backend refuses, with its reason: nothing falls back silently.
    """
    _check_name("operator", op, OPS)
    _check_name("backend", wanted, ("auto", *BACKENDS))
    refused = {name: reason for name in BACKENDS if (reason := refusal(op, name, device))}
    if wanted == "auto":
        return Choice(op, next(name for name in BACKENDS if name not in refused), refused)
    if wanted in refused:
        raise InputError(f"ops.{op}: backend '{wanted}' cannot serve here: {refused[wanted]}; choose 'auto' or another")
    return Choice(op, wanted, refused)


def explain(device: torch.device | str, wanted: Mapping[str, str] | None = None) -> list[Choice]:
    """The choice for every operator on `device`; `wanted` maps operators to backends (`auto` by default)."""
    wanted = wanted or {}
    for op in wanted:
        _check_name("operator", op, OPS)
    return [choose(op, torch.device(device), wanted.get(op, "auto")) for op in OPS]
