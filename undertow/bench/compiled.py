"""Blocks of a model under `torch.compile`: what plain PyTorch reaches without kernels of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from undertow.model.transformer import Transformer
from undertow.ops import OPS, Ops
from undertow.ops.reference.precision import wide

# Attention stays as it is; the products of experts read the rows of each expert on the host, once a call.
_OPAQUE = (
    *("sparse_attention", "csa_attention", "indexer_scores", "indexer_select", "indexer_distillation"),
    *("indexer_recall", "grouped_linear"),
)
# They keep lists of documents, and tables made once for all layers: traced, they would be compiled anew at every batch.
_HOST = (
    *("undertow.ops.segments", "undertow.model.cache", "undertow.model.context", "undertow.model.rotary"),
    *("undertow.model.compressor", "undertow.model.indexer"),
)
_KINDS = 64  # forms of one function: of blocks, and of the shorter documents of the MTP block


@dataclass
class Compilation:
    """What became of it: graphs that were traced, `late` ones among them in steps that were timed, places where tracing
    broke off, and of the graphs that run as they are the reasons, with how many."""

    graphs: int = 0
    late: int = 0
    breaks: int = 0
    plain: dict[str, int] = field(default_factory=dict)

    def leave(self, graph: torch.fx.GraphModule, reason: str) -> Callable[..., Any]:
        """A graph that is not compiled."""
        self.plain[reason] = self.plain.get(reason, 0) + 1
        return graph.forward

    def told(self) -> str:
        """One phrase for a table."""
        left = "".join(f"; {count} not compiled: {reason}" for reason, count in self.plain.items())
        late = f"; {self.late} in timed steps" if self.late else ""
        return f"{self.graphs} graphs, {self.breaks} breaks{late}{left}"

    def json(self) -> dict[str, Any]:
        """Plain values."""
        counts = {"graphs": self.graphs, "graphs_while_timed": self.late, "breaks": self.breaks}
        return counts | {"not_compiled": self.plain, "told": self.told()}


class _Traced:
    """Operators as they are traced: kernels and attention are calls that a graph ends at."""

    def __init__(self, ops: Ops) -> None:
        self.batch_invariant, self.choices, self.calls = ops.batch_invariant, ops.choices, ops.calls
        for op in OPS:
            function, plain = getattr(ops, op), ops.choices[op].chosen == "reference"
            traced = plain and op not in _OPAQUE
            setattr(self, op, function if traced else torch.compiler.disable(function))
        if ops.choices["hyper_expand"].chosen == "reference":
            self.hyper_expand = _expand


def _expand(y: Tensor, post: Tensor, mix: Tensor, streams: Tensor) -> Tensor:
    """`hyper_expand` without writing into parts of a tensor, which cannot be traced."""
    x, wide_y, rows = wide(streams), wide(y), []
    for k in range(streams.shape[1]):
        row = wide_y * post[:, k, None]
        for j in range(streams.shape[1]):
            row = row + x[:, j] * mix[:, j, k, None]
        rows.append(row)
    return torch.stack(rows, 1).to(streams.dtype)


def exchange(model: Transformer, ops: Ops | _Traced) -> None:
    """Let every module compute through `ops`."""
    for module in model.modules():
        if hasattr(module, "ops"):
            module.ops = ops  # type: ignore[reportArgumentType]


@contextmanager
def compiled(model: Transformer, ops: Ops, seconds: float) -> Iterator[Compilation]:
    """Each block of `model` under `torch.compile`, with the operators of `ops`, as they were again afterwards.

    Graphs are compiled when they are first met; those met more than `seconds` after the beginning run as they are.
    """
    from torch._dynamo import config, reset, trace_rules
    from torch._dynamo.utils import counters
    from torch._inductor.compile_fx import compile_fx

    until, made = time.monotonic() + seconds, Compilation()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        made.graphs += 1
        made.breaks = sum(counters["graph_break"].values())
        if time.monotonic() >= until:
            return made.leave(graph, f"met after the {seconds:g} s that --compile gives")
        try:
            return compile_fx(graph, inputs)
        except Exception as fault:  # the compiler's own; the rest is wanted all the same
            return made.leave(graph, " ".join(f"{type(fault).__name__}: {fault}".split())[:200])

    blocks = [*model.layers, *model.mtp]
    reset()
    counters["graph_break"].clear()
    before = list(trace_rules.SKIP_DIRS)
    try:
        for module in _HOST:
            trace_rules.add(module)
        for block in blocks:
            block._compiled_call_impl = torch.compile(block._call_impl, backend=backend, dynamic=False)  # type: ignore[reportArgumentType]
        exchange(model, _Traced(ops))
        with config.patch(recompile_limit=_KINDS):
            yield made
    finally:
        for block in blocks:
            block._compiled_call_impl = None  # type: ignore[reportArgumentType]
        exchange(model, ops)
        trace_rules.SKIP_DIRS[:] = before
        trace_rules._recompile_re()
        reset()
