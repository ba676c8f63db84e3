"""Calls of the products with quantised weights at the sizes of the models, on tensors that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.ops.triton.compile_all import Case


def cases() -> Iterator[Case]:
    """Both products of routed experts in both formats, few rows an expert and many, and dense products."""
    from undertow.ops.triton.grouped.quantised import grouped_linear_quantised, linear_quantised
    from undertow.quant.blocks import grid_shape
    from undertow.quant.formats import E2M1, UE8M0
    from undertow.quant.quantised import Quantised
    from undertow.quant.scheme import MXFP4, WEIGHTS, Scheme

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def weight(scheme: Scheme, *shape: int) -> Quantised:
        *lead, wide = shape
        codes = empty(*lead, wide // 2 if scheme.format is E2M1 else wide, dtype=scheme.format.dtype)
        scales = empty(
            *grid_shape(shape, scheme.block), dtype=UE8M0.dtype if scheme.scale == "ue8m0" else torch.float32
        )
        return Quantised(codes, scales, scheme.block)

    def experts(scheme: Scheme, rows: int, number: int, out: int, width: int) -> None:
        counts = empty(number, dtype=torch.int64)
        grouped_linear_quantised(empty(rows, width), weight(scheme, number, out, width), counts)

    def dense(scheme: Scheme, rows: int, out: int, width: int) -> None:
        linear_quantised(empty(rows, width), weight(scheme, out, width))

    floats = Scheme(WEIGHTS.format, WEIGHTS.block, "float32")
    for name, scheme in (("fp8", WEIGHTS), ("fp8, float32 scales", floats), ("mxfp4", MXFP4)):
        yield (
            f"{name}, 384 rows, 4096 to 2 x 2048",
            scheme is not floats,
            partial(experts, scheme, 384, 256, 4096, 4096),
        )
        yield f"{name}, 4096 rows, 3072 to 7168", False, partial(experts, scheme, 4096, 384, 7168, 3072)
        yield f"{name}, 16384 rows, 3072 to 7168", False, partial(experts, scheme, 16384, 384, 7168, 3072)
        yield f"{name}, 24576 rows, 7168 to 2 x 3072", False, partial(experts, scheme, 49152, 384, 6144, 7168)
    yield "fp8 in fnuz, 384 rows", False, partial(experts, WEIGHTS.in_dialect("fnuz"), 384, 256, 4096, 2048)
    for rows in (1, 64, 4096):
        yield f"fp8, dense, {rows} rows", False, partial(dense, WEIGHTS, rows, 1024, 4096)
