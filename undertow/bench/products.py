"""Matrix products that sampling takes: of rows whose bits depend on no other row, and with quantised experts.

Both are bound by the bytes of the weights where rows are few. Beside ours stand the library's products of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from undertow.bench.backends import own
from undertow.bench.operation import LAUNCHES, moved, normal
from undertow.bench.task import PEER, Absent, Run, Task, Way, relative
from undertow.bench.work import Work
from undertow.ops import Ops
from undertow.quant.blocks import Block
from undertow.quant.formats import E2M1, E4M3
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import Scheme

SCHEMES = {"fp8": Scheme(E4M3, Block(128, 128)), "mxfp4": Scheme(E2M1, Block(1, 32))}
_EXACT = 1e-5  # of products with a float32 result, whose sums are longer than those of other operators


@dataclass(frozen=True)
class Products:
    """Sides of linear layers (inputs, outputs) in bfloat16, those of the head with a float32 result, rows besides the
    asked ones; of experts how many there are, choices of a token, width and inner width, and tokens of a call."""

    sides: tuple[tuple[int, int], ...] = ((4096, 1024), (1024, 32768), (8192, 4096))
    head: tuple[int, int] = (4096, 129280)
    few: tuple[int, ...] = (1, 64)
    experts: int = 256
    choices: int = 6
    width: int = 4096
    inner: int = 2048
    decoded: tuple[int, ...] = (8, 64)


FLASH = Products()
TINY = Products(((64, 32),), (64, 96), (1,), 4, 2, 128, 128, (3,))
"""The same for a CPU."""


def invariant_tasks(
    s: Products, lengths: Sequence[int], device: torch.device, peers: Collection[str]
) -> Iterator[Task]:
    """Linear layers under `batch_invariant`, at few rows and at the asked number; of the head few rows alone."""
    many = sum(lengths)
    for rows in dict.fromkeys((*s.few, many)):
        for inside, out in s.sides:
            yield _linear("linear", rows, inside, out, device, peers)
    for rows in s.few:
        yield _linear("wide_linear", rows, *s.head, device, peers)


def _linear(op: str, rows: int, inside: int, out: int, device: torch.device, peers: Collection[str]) -> Task:
    x = normal(rows, inside, device=device, seed=1)
    weight = normal(out, inside, device=device, seed=2).mul_(inside**-0.5)
    wide = op == "wide_linear"
    result = rows * out * (4 if wide else 2)

    def bind(function: Callable[[Tensor, Tensor], Tensor]) -> Run:
        return torch.no_grad()(lambda: function(x, weight))

    def kernel() -> Run:
        table = Ops(batch_invariant=True, device=device)
        if reason := table.choices[op].refused.get("triton"):
            raise Absent(reason)
        return bind(getattr(table, op))

    def error(found: Tensor) -> float:
        return relative(found, functional.linear(x.float(), weight.float()))

    ways = {"triton": Way(kernel, _EXACT if wide else 3e-3)}
    if "reference" in peers:
        ways["reference"] = Way(lambda: bind(getattr(Ops({op: "reference"}, batch_invariant=True, device=device), op)))
    if "torch" in peers and not wide:
        ways["torch"] = Way(lambda: bind(functional.linear), PEER)
    products = 2.0 * rows * inside * out
    name = "row by row" + (" to float32" if wide else "")
    work = Work(moved(x, weight) + result, products, products)
    return Task(name, f"{rows} x {inside} to {out}", work, error, ways, LAUNCHES if rows < 512 else 1)


def decode_tasks(s: Products, lengths: Sequence[int], device: torch.device, peers: Collection[str]) -> Iterator[Task]:
    """Products of experts with FP8 and MXFP4 weights at a few tokens, and at the asked number."""
    generator = torch.Generator().manual_seed(7)
    for tokens in dict.fromkeys((*s.decoded, sum(lengths))):
        chosen = torch.rand(tokens, s.experts, generator=generator).topk(s.choices).indices
        counts = torch.bincount(chosen.flatten(), minlength=s.experts)
        for name, inside, out in (("fc1", s.width, 2 * s.inner), ("fc2", s.inner, s.width)):
            for scheme in SCHEMES:
                yield _experts(name, scheme, tokens, counts, inside, out, device, peers)


def _experts(
    name: str, scheme: str, tokens: int, counts: Tensor, inside: int, out: int, device: torch.device,
    peers: Collection[str],
) -> Task:  # fmt: skip
    rows, experts = int(counts.sum()), len(counts)
    x = normal(rows, inside, device=device, seed=1)
    weight = _quantised(scheme, experts, out, inside, device)
    held = counts.to(device)

    def bind(function: Callable[..., Any], *given: Any) -> Run:
        return torch.no_grad()(lambda: function(x, *given))

    def error(found: Tensor) -> float:
        parts, start = [], 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                one = Quantised(weight.payload[expert], weight.scales[expert], SCHEMES[scheme].block)
                parts.append(x[start : start + count].float() @ one.dequantise(torch.float32).t())
            start += count
        return relative(found, torch.cat(parts))

    def library() -> Run:
        if device.type == "cpu" or not hasattr(torch, "_grouped_mm"):
            raise Absent("torch._grouped_mm is taken on a GPU, from torch 2.8 on")
        grouped: Any = torch._grouped_mm  # type: ignore[reportPrivateImportUsage]
        plain, ends = weight.dequantise(torch.bfloat16), held.cumsum(0).int()
        return bind(lambda rows, matrices: grouped(rows, matrices.mT, offs=ends), plain)

    op = "grouped_linear_quantised"
    ways = {"triton": Way(lambda: bind(own(op, "triton", device), weight, held), 3e-3)}
    if "reference" in peers:
        ways["reference"] = Way(lambda: bind(own(op, "reference", device), weight, held))
    if "torch" in peers:
        ways["torch"] = Way(library, PEER)
    used = int((counts > 0).sum()) / experts
    products = 2.0 * rows * inside * out
    work = Work(int(weight.nbytes * used) + moved(x) + rows * out * 2, products, products)
    return Task(f"decode {name} {scheme}", f"{tokens} tokens, {experts} experts, {inside} to {out}", work, error, ways)


def _quantised(scheme: str, experts: int, out: int, inside: int, device: torch.device) -> Quantised:
    """Weights of normal numbers, an expert at a time, since all of them in float32 are too large."""
    made = [
        quantise(normal(out, inside, device=device, seed=2 + e).mul_(inside**-0.5), SCHEMES[scheme])
        for e in range(experts)
    ]
    payload, scales = (_stacked([getattr(m, part) for m in made]) for part in ("payload", "scales"))
    return Quantised(payload, scales, SCHEMES[scheme].block)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Codes or scales, which torch stacks as bytes alone."""
    return torch.stack([x.view(torch.uint8) for x in parts]).view(parts[0].dtype)
