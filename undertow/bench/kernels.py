"""What `undertow bench kernels` runs: which tasks there are, on which shapes, and the result file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from undertow.bench import attention, experts, fusions, indexer, loss, optimizer, products
from undertow.bench.ceilings import Ceilings, ceilings
from undertow.bench.environment import environment
from undertow.bench.quantising import quantise_tasks
from undertow.bench.task import Task, run_task
from undertow.config.errors import InputError

PEERS = ("reference", "torch", "compile", "flex", "torch.topk", "deep-gemm", "tilelang")
_LAYER = {
    "norm": fusions.norm_tasks,
    "rotary": fusions.rotary_tasks,
    "hyper": fusions.hyper_tasks,
    "pool": fusions.pool_tasks,
    "swiglu": fusions.swiglu_tasks,
}
_PRODUCTS = {"decode": products.decode_tasks, "invariant": products.invariant_tasks}
_ROUTED = {"router": experts.router_tasks, "permute": experts.permute_tasks}
SIZED = "optimizer"
"""The operator whose sizes are those of parameters, whatever the tokens."""
OPS = (*attention.FORMS, "indexer", "distillation", *_LAYER, *_ROUTED, "experts", *_PRODUCTS, "loss", SIZED, "quantise")
_LENGTHS: dict[str, tuple[tuple[int, ...], ...]] = {"csa": ((4096,), (8192,), (16384,)), "quantise": ((65536,),)}
_TINY_LENGTHS = ((96,),)
_MOST = (1 << 31) - 1  # tokens that an int32 numbers
_SAID = 60  # letters of a wrong shape that are repeated

Lengths = tuple[int, ...]


def check_names(kind: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise `InputError` for the first name that is not known."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise InputError(f"{kind} {name}: unknown{hint} (known: {', '.join(known)})")


def parse_shape(text: str) -> Lengths:
    """Tokens of each document: `4096`, or `1000+3096` for two that are packed. Raises `InputError`."""
    parts = [part.lstrip("0") for part in text.split("+") if part.isascii() and part.isdigit()]
    said = text if len(text) <= _SAID else f"{text[:_SAID]}..."
    if len(parts) <= text.count("+") or "" in parts:
        raise InputError(f"--shape {said}: write the tokens of each document, as 4096, or 1000+3096 for packed ones")
    # Python reads no number of more than some thousand digits.
    if any(len(part) > len(str(_MOST)) for part in parts) or sum(map(int, parts)) > _MOST:
        raise InputError(f"--shape {said}: the documents have more than {_MOST:,} tokens in all; name fewer")
    return tuple(map(int, parts))


def lengths_of(op: str, device: torch.device) -> Sequence[Lengths]:
    """The shapes of an operator where none is asked for; small ones on a CPU."""
    return _TINY_LENGTHS if device.type == "cpu" else _LENGTHS.get(op, ((4096,),))


def _shapes(op: str, asked: Sequence[Lengths], device: torch.device) -> Sequence[Lengths]:
    found = asked or lengths_of(op, device)
    return found[:1] if op == SIZED else found


def tasks(op: str, lengths: Lengths, device: torch.device, peers: Collection[str]) -> Iterator[Task]:
    """The tasks of an operator in `OPS` on documents of these lengths."""
    cpu = device.type == "cpu"
    if op in attention.FORMS:
        forms = attention.TINY if cpu else attention.FORMS
        yield from attention.attention_tasks(op, forms[op], lengths, device, peers)
    elif op == "quantise":
        yield from quantise_tasks(sum(lengths), device)
    elif op == SIZED:
        yield from optimizer.optimizer_tasks(optimizer.TINY if cpu else optimizer.FLASH, device, peers)
    elif op == "loss":
        yield from loss.loss_tasks(loss.TINY if cpu else loss.FLASH, lengths, device, peers)
    elif op in ("indexer", "distillation"):
        make = indexer.indexer_tasks if op == "indexer" else indexer.distillation_tasks
        yield from make(indexer.TINY if cpu else indexer.FLASH, lengths, device, peers)
    else:
        yield from _layer_tasks(op, lengths, device, peers)


def _layer_tasks(op: str, lengths: Lengths, device: torch.device, peers: Collection[str]) -> Iterator[Task]:
    cpu = device.type == "cpu"
    sizes, counts = (fusions.TINY, experts.TINY_EXPERTS) if cpu else (fusions.FLASH, experts.EXPERTS)
    if op in _LAYER:
        yield from _LAYER[op](sizes, lengths, device, peers)
    elif op in _PRODUCTS:
        yield from _PRODUCTS[op](products.TINY if cpu else products.FLASH, lengths, device, peers)
    elif op in _ROUTED:
        yield from _ROUTED[op](sizes, counts[-1], lengths, device, peers)
    else:
        yield from experts.expert_tasks(sizes, counts, lengths, device, peers)


def bench_kernels(
    ops: Sequence[str],
    shapes: Sequence[Lengths],
    peers: Collection[str],
    device: torch.device,
    deterministic: bool = False,
    follow: Callable[[int, int, str], None] = lambda done, of, what: None,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Time every way of every task, and return the content of the result file.

    `shapes` are those of every operator; without any each has its own. `deterministic` asks torch, and so our kernels,
    for results of the same bits every time. `follow` is told what is being measured, `save` is given the result so far
    after each operator and shape. On a GPU everything runs in one stream beside the default one, as the capture of
    graphs wants it.
    """
    wanted = [(op, lengths) for op in ops for lengths in _shapes(op, shapes, device)]
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    with stream, _deterministic(deterministic):
        follow(0, len(wanted), "ceilings")
        reached = ceilings(device)
        result = _empty(device, reached, deterministic)
        for done, (op, lengths) in enumerate(wanted):
            shape = f"{'+'.join(map(str, lengths))} tokens"
            follow(done, len(wanted), f"{op}, {shape}: inputs")
            try:
                for task in tasks(op, lengths, device, peers):
                    follow(done, len(wanted), f"{task.op}, {task.shape}")
                    result["rows"] += run_task(task, reached, device)
            except RuntimeError as fault:  # no memory for the inputs, or a kernel before left the GPU unusable
                reason = " ".join(f"{type(fault).__name__}: {fault}".split())[:400]
                result["failures"].append({"op": op, "shape": shape, "reason": reason})
            save(result)
    return result


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms where there are any, without the filling of new tensors that torch adds to them."""
    if not wanted:
        yield
        return
    settings: Any = torch.utils.deterministic
    before, filling = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=lenient)
        settings.fill_uninitialized_memory = filling


def _empty(device: torch.device, reached: Ceilings, deterministic: bool) -> dict[str, Any]:
    return {
        "kind": "kernels",
        "environment": environment(),
        "device": str(device),
        "deterministic": deterministic,
        "ceilings": reached.json(),
        "units": {
            "ms": "milliseconds; median, lowest and highest of the repeats",
            "floor_ms": "the larger of bytes over the copy rate and exact operations over the matmul rate",
            "error": "relative to the reference in float32",
            "flops_exact": "operations on what a query sees",
            "flops_nominal": "operations on every slot",
        },
        "rows": [],
        "failures": [],
    }
