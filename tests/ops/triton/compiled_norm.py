"""Calls of the kernels that norm and rotate rows, in the sizes of both models, to be compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def cases() -> Iterator[tuple[str, bool, Callable[[], object]]]:
    """RMSNorm of hidden states and latents, rotated queries and entries, forward and backward."""
    import torch

    from undertow.ops.triton.norm.heads import head_norm_rotary
    from undertow.ops.triton.norm.rotary import rotary
    from undertow.ops.triton.norm.rows import rms_norm

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def back(out: torch.Tensor) -> None:
        out.backward(torch.empty_like(out))

    def norm(width: int, dtype: torch.dtype = torch.bfloat16) -> None:
        back(rms_norm(empty(4096, width, dtype=dtype), empty(width, dtype=dtype), 1e-6))

    def tables() -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.empty(4096, 32, device="meta") for _ in range(2))  # type: ignore[return-value]

    def rotated(*shape: int) -> None:
        back(rotary(empty(4096, *shape), *tables()))

    yield "norm of 4096", True, lambda: norm(4096)
    for width in (512, 1024, 1536, 7168):
        yield f"norm of {width}", False, lambda width=width: norm(width)
    yield "norm of 8192 in float32", False, lambda: norm(8192, torch.float32)
    yield "norm of heads of 512", True, lambda: back(head_norm_rotary(empty(4096, 64, 512), *tables(), 1e-6))
    yield "norm of 128 heads of 512", False, lambda: back(head_norm_rotary(empty(4096, 128, 512), *tables(), 1e-6))
    yield "rotary of heads of 512", False, lambda: rotated(64, 512)
    yield "rotary of index heads of 128", False, lambda: rotated(64, 128)
    yield "rotary of entries", False, lambda: rotated(512)
