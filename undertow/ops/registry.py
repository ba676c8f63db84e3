"""Which backend serves an operator on a machine, and why the others do not: one table, one rule.

A backend may refuse twice: all calls on a machine, when a model's operators are chosen, and a single call, by its
types and shapes. `auto` then takes the next one; a backend that was asked for by name is an error.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from undertow.config.errors import InputError
from undertow.ops.calls import Calls
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
    quantised,
    rotary,
    router,
)
from undertow.quant.kernels import architecture

# Best first: the first backend that does not refuse is what `auto` takes.
BACKENDS = ("triton", "reference")

REFERENCE: dict[str, Callable[..., Any]] = {
    "linear": linear.linear,
    "wide_linear": linear.wide_linear,
    "block_linear": linear.block_linear,
    "rms_norm": norm.rms_norm,
    "rotary": rotary.rotary,
    "head_norm_rotary": rotary.head_norm_rotary,
    "sinkhorn": hyper.sinkhorn,
    "hyper_coefficients": hyper.hyper_coefficients,
    "hyper_collapse": hyper.hyper_collapse,
    "hyper_in": hyper.hyper_in,
    "hyper_expand": hyper.hyper_expand,
    "hyper_head": hyper.hyper_head,
    "compress_pool": compress.compress_pool,
    "indexer_scores": indexer.indexer_scores,
    "indexer_select": indexer.indexer_select,
    "sparse_attention": attention.sparse_attention,
    # The same operator in layers whose indexer chooses entries, so that its backend can be chosen apart.
    "csa_attention": attention.sparse_attention,
    "indexer_distillation": distillation.indexer_distillation,
    "indexer_recall": distillation.indexer_recall,
    "route": router.route,
    "dispatch_order": experts.dispatch_order,
    "permute": experts.permute,
    "unpermute": experts.unpermute,
    "permute_weights": experts.permute_weights,
    "grouped_linear": experts.grouped_linear,
    "linear_quantised": quantised.linear_quantised,
    "grouped_linear_quantised": quantised.grouped_linear_quantised,
    "swiglu": experts.swiglu,
    "linear_cross_entropy": cross_entropy.linear_cross_entropy,
    "linear_cross_entropy_mean": cross_entropy.linear_cross_entropy_mean,
}
OPS = tuple(REFERENCE)

# Operators whose fast form may depend on the other rows of a call; they take `invariant`.
FIXED_ORDER = frozenset(
    ("linear", "wide_linear", "block_linear", "hyper_in", "hyper_head", "compress_pool", "indexer_scores",
    "indexer_select", "sparse_attention", "csa_attention", "indexer_distillation", "indexer_recall", "grouped_linear",
    "linear_quantised", "grouped_linear_quantised", "linear_cross_entropy", "linear_cross_entropy_mean") )  # fmt: skip


def recipe_key(op: str) -> str:
    """The key of a recipe that chooses the operator's backend."""
    attention = {"sparse_attention": "attention.backend", "csa_attention": "attention.csa_backend"}
    return attention.get(op, f"ops.{op}")


class Kernel(NamedTuple):
    """An operator in Triton: its module, imported when it is first called, and in words which calls it serves.

    The module has a function by the name of the reference's, with its parameters, and `refusal`, which takes those of
    them that it judges by and returns why the kernels do not serve such a call, or None if they do.
    """

    module: str
    serves: str


_ATTENTION = Kernel(
    "undertow.ops.triton.attention.sparse",
    "bfloat16; 8, 16, 32, 64 or 128 heads of a multiple of 64 numbers; windows up to 128; no past",
)
_INDEXER = "bfloat16; 16, 32 or 64 index heads of 16, 32, 64 or 128 numbers; no past"
_DISTILLATION = (
    "bfloat16; 16, 32 or 64 index heads of 16, 32, 64 or 128 numbers; 8, 16, 32, 64 or 128 attention heads of a "
    "multiple of 16 numbers; log-sum-exps in float32; no past"
)
_ROWS = "bfloat16 or float32; rows of up to 8,192 numbers"
_TURNED = "bfloat16 or float32, tables in float32; rows of an even number up to 8,192"
_MOVED = "bfloat16 or float32"
_LOSS = Kernel("undertow.ops.triton.cross_entropy.linear", "bfloat16; labels in int64")
_QUANTISED = Kernel(
    "undertow.ops.triton.grouped.quantised",
    "bfloat16 rows without gradient; FP8 in blocks of 128x128, or MXFP4; columns a multiple of 128",
)
TRITON: dict[str, Kernel] = {
    "wide_linear": Kernel("undertow.ops.triton.wide_linear", "bfloat16"),
    "rms_norm": Kernel("undertow.ops.triton.norm.rows", _ROWS),
    "rotary": Kernel("undertow.ops.triton.norm.rotary", _TURNED),
    "head_norm_rotary": Kernel("undertow.ops.triton.norm.heads", _TURNED),
    "hyper_in": Kernel(
        "undertow.ops.triton.hyper.read",
        "bfloat16 streams, 2 or 4 of up to 16,384 numbers; coefficients in float32; up to 32 Sinkhorn steps",
    ),
    "hyper_expand": Kernel(
        "undertow.ops.triton.hyper.expand", "bfloat16 or float32, 2 or 4 streams; coefficients in float32"
    ),
    "hyper_head": Kernel(
        "undertow.ops.triton.hyper.head",
        "bfloat16 streams, 2 or 4 of up to 16,384 numbers; coefficients in float32",
    ),
    "compress_pool": Kernel(
        "undertow.ops.triton.compress.pool", "float32; windows of up to 256 slots, begun in this call"
    ),
    "route": Kernel("undertow.ops.triton.router.route", "float32; up to 1024 experts and 16 choices"),
    "dispatch_order": Kernel("undertow.ops.triton.permute.order", "up to 1024 experts; fewer than 2^30 choices"),
    "permute": Kernel("undertow.ops.triton.permute.permute", _MOVED),
    "unpermute": Kernel("undertow.ops.triton.permute.unpermute", _MOVED),
    "permute_weights": Kernel("undertow.ops.triton.permute.weights", _MOVED),
    "grouped_linear": Kernel(
        "undertow.ops.triton.grouped.linear", "bfloat16; contiguous weights whose sides are multiples of 16"
    ),
    "linear_quantised": _QUANTISED,
    "grouped_linear_quantised": _QUANTISED,
    "swiglu": Kernel("undertow.ops.triton.swiglu.gated", "bfloat16, float16 and float32 rows; weights in float32"),
    "linear_cross_entropy": _LOSS,
    "linear_cross_entropy_mean": _LOSS,
    "sparse_attention": _ATTENTION,
    "csa_attention": _ATTENTION,
    "indexer_scores": Kernel("undertow.ops.triton.indexer.select", _INDEXER),
    "indexer_select": Kernel("undertow.ops.triton.indexer.select", _INDEXER),
    "indexer_distillation": Kernel("undertow.ops.triton.indexer.distillation", _DISTILLATION),
}

_FIXED = Kernel("undertow.ops.triton.invariant.linear", "bfloat16")
INVARIANT: dict[str, Kernel] = {
    "linear": _FIXED,
    "wide_linear": _FIXED,
    "block_linear": _FIXED,
    "grouped_linear": TRITON["grouped_linear"],
    "linear_cross_entropy": _LOSS,
    "linear_cross_entropy_mean": _LOSS,
}
"""The kernels of operators of `FIXED_ORDER` that serve `batch_invariant`: they give a row the same bits whatever shares
the call, and which calls they refuse does not depend on what that is."""


class Machine(NamedTuple):
    """What decides where kernels run: torch's device type, the architecture of a GPU, and whether Triton is there."""

    device: str
    architecture: str = ""
    triton: bool = True


@dataclass(frozen=True)
class Choice:
    """The backend of one operator on one machine, and the reason each other one was refused.

    `serves` says which calls a kernel takes, empty for all. `others` are the backends that any other call goes to, best
    first; there are none if a backend was asked for by name, and such a call is an error. `invariant` is
    whether results must have the same bits whatever shares the call.
    """

    op: str
    chosen: str
    refused: dict[str, str]
    serves: str = ""
    others: tuple[str, ...] = ()
    invariant: bool = False

    def __str__(self) -> str:
        otherwise = self.others[0] if self.others else "an error"
        return f"{self.chosen} ({self.serves}; {otherwise} otherwise)" if self.serves else self.chosen


def machine(device: torch.device) -> Machine:
    """The machine behind a device of torch."""
    found = device.type == "cuda" and torch.cuda.device_count() > 0
    return Machine(device.type, architecture(device) if found else "", find_spec("triton") is not None)


def _entry(op: str, invariant: bool) -> Kernel | None:
    return (INVARIANT if invariant and op in FIXED_ORDER else TRITON).get(op)


def refusal(op: str, backend: str, machine: Machine, invariant: bool = False) -> str | None:
    """Why `backend` serves no call of `op` on `machine`, or None if it serves some; `invariant` is whether results must
    have the same bits whatever shares the call."""
    if backend == "reference":
        return None
    if backend != "triton" or (op not in TRITON and _entry(op, invariant) is None):
        return f"no {backend} kernel for {op} in this version"
    if machine.device != "cuda":
        return "triton kernels run on a GPU"
    if not machine.triton:
        return "triton is not installed; pip install 'undertow[gpu]' brings it"
    kind, _, number = machine.architecture.partition("_")
    if kind == "sm" and int(number) < 80:
        return f"triton kernels need sm_80 or later, this is {machine.architecture}"
    return None if _entry(op, invariant) else "triton kernels keep no fixed order for batch_invariant"


def _check_name(kind: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise InputError(f"unknown {kind} '{name}'{hint} (known: {', '.join(known)})")


def choose(op: str, device: torch.device | Machine, wanted: str = "auto", *, invariant: bool = False) -> Choice:
    """The backend for `op` on `device`. `wanted` names one, or `auto`.

    Raises `InputError` if the wanted backend refuses, with its reason: nothing falls back silently.
    """
    _check_name("operator", op, OPS)
    _check_name("backend", wanted, ("auto", *BACKENDS))
    place = device if isinstance(device, Machine) else machine(device)
    refused = {name: reason for name in BACKENDS if (reason := refusal(op, name, place, invariant))}
    if wanted in refused:
        raise InputError(
            f"{recipe_key(op)}: backend '{wanted}' cannot serve here: {refused[wanted]}; choose 'auto' or another"
        )
    chosen, *others = [name for name in BACKENDS if name not in refused] if wanted == "auto" else [wanted]
    entry = _entry(op, invariant) if chosen == "triton" else None
    return Choice(op, chosen, refused, entry.serves if entry else "", tuple(others), invariant)


def explain(
    device: torch.device | str, wanted: Mapping[str, str] | None = None, *, invariant: bool = False
) -> list[Choice]:
    """The choice for every operator on `device`; `wanted` maps operators to backends (`auto` by default)."""
    wanted = wanted or {}
    for op in wanted:
        _check_name("operator", op, OPS)
    place = machine(torch.device(device))
    return [choose(op, place, wanted.get(op, "auto"), invariant=invariant) for op in OPS]


def summary(choices: Iterable[Choice]) -> str:
    """One line on which backend serves which operators, and which calls of them."""
    groups: dict[str, list[str]] = {}
    for choice in choices:
        groups.setdefault(str(choice), []).append(choice.op)
    plain = groups.pop("reference", [])
    told = [f"{', '.join(ops)} by {backend}" for backend, ops in groups.items()]
    return "; ".join([*told, *([f"{'the others' if told else 'all'} by reference"] if plain else [])])


def function(choice: Choice, invariant: bool = False, calls: Calls | None = None) -> Callable[..., Any]:
    """What computes the operator as `choice` says; those of fixed order are told whether that must be kept. Calls of an
    operator that has a kernel are counted in `calls`."""
    if choice.chosen == "reference":
        plain = REFERENCE[choice.op]
        return partial(plain, invariant=invariant) if choice.op in FIXED_ORDER else plain
    served = partial(_serve, choice, calls or Calls())
    return partial(served, invariant=True) if invariant and choice.op in FIXED_ORDER else served


def taker(choice: Choice, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The backend that takes a call with these arguments, and why the one before it refuses it ("" if none does).

    Raises `InputError` where a backend that was asked for by name refuses.
    """
    if choice.chosen == "reference":
        return "reference", ""
    module, _, parameters, judged = _kernel(choice.op, choice.invariant)
    given = parameters.bind(*args, **kwargs).arguments
    reason = module.refusal(**{name: given[name] for name in judged if name in given})
    if reason is None:
        return choice.chosen, ""
    if choice.others:
        return choice.others[0], reason
    raise InputError(
        f"{recipe_key(choice.op)}: backend '{choice.chosen}' cannot serve this call: {reason}; choose 'auto' or another"
    )


def _serve(choice: Choice, calls: Calls, *args: Any, **kwargs: Any) -> Any:
    """A call of an operator that has a kernel, by the kernel if it takes the call."""
    taken, reason = taker(choice, *args, **kwargs)
    calls.count(choice.op, taken, choice.chosen, reason)
    function = REFERENCE[choice.op] if taken == "reference" else _kernel(choice.op, choice.invariant)[1]
    return function(*args, **kwargs)


@cache
def _kernel(op: str, invariant: bool) -> tuple[Any, Callable[..., Any], inspect.Signature, tuple[str, ...]]:
    """Of the operator in Triton: module, function, its parameters, and names of those that the refusal judges by."""
    entry = _entry(op, invariant)
    assert entry is not None  # refused before
    module = importlib.import_module(entry.module)
    function = getattr(module, {"csa_attention": "sparse_attention"}.get(op, op))
    return module, function, inspect.signature(function), tuple(inspect.signature(module.refusal).parameters)
