"""Quantising and reading back: bound by memory, and checked bit for bit against plain torch on the first rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from undertow.bench.task import Run, Task, Way
from undertow.bench.work import Work
from undertow.quant.blocks import Block
from undertow.quant.formats import E2M1, E4M3
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import Scheme

SCHEMES = {
    "weights fp8 128x128": Scheme(E4M3, Block(128, 128)),
    "weights mxfp4": Scheme(E2M1, Block(1, 32)),
    "activations fp8 1x128": Scheme(E4M3, Block(1, 128)),
}
_COLUMNS, _TINY_COLUMNS = 7168, 256
_CHECKED = 256


def quantise_tasks(rows: int, device: torch.device) -> Iterator[Task]:
    """Both directions of every scheme on `rows` rows of bfloat16."""
    gpu = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(2)
    columns = _COLUMNS if gpu else _TINY_COLUMNS
    values = torch.randn(rows, columns, generator=generator, device=device).bfloat16()
    way = "triton" if gpu else "reference"
    for name, scheme in SCHEMES.items():
        made = quantise(values, scheme)
        expected = quantise(values[:_CHECKED].cpu(), scheme)
        work, shape = Work(values.nbytes + made.nbytes), f"{rows} x {columns}, {name}"
        yield Task("quantise", shape, work, _of_codes(expected), {way: Way(_quantise(values, scheme), 0.0)})
        again = expected.dequantise(torch.bfloat16)
        yield Task("dequantise", shape, work, _of_numbers(again), {way: Way(_dequantise(made), 0.0)})


def _quantise(values: Tensor, scheme: Scheme) -> Callable[[], Run]:
    return lambda: lambda: quantise(values, scheme)


def _dequantise(made: Quantised) -> Callable[[], Run]:
    return lambda: lambda: made.dequantise(torch.bfloat16)


def _of_codes(expected: Quantised) -> Callable[[Quantised], float]:
    def error(found: Quantised) -> float:
        payload = found.payload[: expected.payload.shape[0]].cpu().view(torch.uint8)
        scales = found.scales[: expected.scales.shape[0]].cpu().view(torch.uint8)
        same = torch.equal(payload, expected.payload.view(torch.uint8))
        return 0.0 if same and torch.equal(scales, expected.scales.view(torch.uint8)) else math.inf

    return error


def _of_numbers(expected: Tensor) -> Callable[[Tensor], float]:
    return lambda found: 0.0 if torch.equal(found[: len(expected)].cpu(), expected) else math.inf
