"""Triton's interpreter, mended where it computes wrongly: kernels run on CPU tensors as they would on a GPU.

The interpreter holds bfloat16 as the 16 bits of each number and lets NumPy multiply and compare those. `repair` widens
them to float32 for every operation and rounds results and casts to nearest even, not towards zero. It also lets a
scalar tensor bound a loop, which newer NumPy forbids, and has the functions of the mathematical library that kernels
call, as torch computes them. Kernels stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface, TensorHandle

_BF16 = tl.bfloat16


def repair() -> None:
    """Mend the interpreter of this process, once; the second call does nothing."""
    if getattr(InterpreterBuilder, "_undertow", False):
        return
    InterpreterBuilder._undertow = True  # type: ignore[attr-defined]
    _widen_operators()
    _widen_reductions()
    _index_scalars()
    _bring_library()


def _widened(x: TensorHandle) -> TensorHandle:
    if x.dtype.scalar != _BF16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrowed(data: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorHandle(np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16), dtype)


def _widen_operators() -> None:
    builder: Any = InterpreterBuilder
    dot, binary, unary = builder.create_dot, builder.binary_op, builder.unary_op
    cast = builder.cast_impl

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle, *rest: Any) -> TensorHandle:
        return dot(self, _widened(a), _widened(b), c, *rest)

    def binary_op(self: Any, a: TensorHandle, b: TensorHandle, operator: Callable[..., Any]) -> TensorHandle:
        if _BF16 not in (a.dtype.scalar, b.dtype.scalar):
            return binary(self, a, b, operator)
        out = binary(self, _widened(a), _widened(b), operator)
        return out if out.data.dtype == bool else _narrowed(out.data, a.dtype.scalar)

    def unary_op(self: Any, a: TensorHandle, operator: Callable[..., Any]) -> TensorHandle:
        if a.dtype.scalar != _BF16:
            return unary(self, a, operator)
        return _narrowed(unary(self, _widened(a), operator).data, _BF16)

    def cast_impl(self: Any, a: TensorHandle, dtype: tl.dtype) -> TensorHandle:
        a = _widened(a)
        if dtype.scalar != _BF16:
            return a if a.dtype.scalar == dtype.scalar else cast(self, a, dtype)
        return _narrowed(a.data.astype(np.float32), _BF16)

    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op
    builder.cast_impl = cast_impl


def _widen_reductions() -> None:
    interface: Any = ReduceScanOpInterface
    reduce = interface.apply

    def of(tensor: Any, handle: TensorHandle, dtype: tl.dtype) -> Any:
        shape = list(handle.data.shape)
        return tl.core.tensor(handle, tl.block_type(dtype, shape) if tensor.type.is_block() else dtype)

    def apply(self: Any, inputs: Any) -> Any:
        if not isinstance(inputs, tuple):
            return apply(self, (inputs,))[0]
        narrow = [each.dtype == _BF16 for each in inputs]
        wide = [of(x, _widened(x.handle), tl.float32) if n else x for x, n in zip(inputs, narrow, strict=True)]
        out: Sequence[Any] = reduce(self, tuple(wide))
        # A reduction may return fewer or other tensors than it took, such as an index beside a value.
        kinds = [*narrow, *[False] * len(out)]
        return tuple(
            of(x, _narrowed(x.handle.data, _BF16), _BF16) if n and x.dtype == tl.float32 else x
            for x, n in zip(out, kinds, strict=False)
        )

    interface.apply = apply


def _index_scalars() -> None:
    module: Any = interpreter
    patch = module._patch_lang_tensor

    def index(self: Any) -> int:
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    module._patch_lang_tensor = patched


def _bring_library() -> None:
    def of(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            data = function(torch.from_numpy(np.ascontiguousarray(x.handle.data))).numpy()
            return tl.core.tensor(TensorHandle(data, x.handle.dtype), x.type)

        return apply

    for name in ("exp", "expm1", "log1p"):
        setattr(libdevice, name, of(getattr(torch, name)))
