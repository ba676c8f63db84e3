"""Single modules of a layer computed again in the backward pass: of each, its inputs are kept and nothing else."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks

from undertow.config.training import RecomputeModule
from undertow.ops.segments import Rows

Remake = Callable[..., Any]
"""`(module, function, *inputs) -> function(*inputs)`, maybe computed again in the backward pass. Inputs are tensors,
`Rows` and None, results a tensor or a tuple of them. The function finds parameters by itself, and repeats its choices.
"""

_Read = Callable[[], Tensor]
_Key = tuple[str, int]


def kept(module: RecomputeModule, function: Callable[..., Any], *inputs: Tensor | Rows | None) -> Any:
    """`function(*inputs)`, of which all is kept that its backward pass reads."""
    return function(*inputs)


@contextmanager
def remaking(modules: Set[RecomputeModule]) -> Iterator[Remake]:
    """What runs the modules of one layer in one forward pass, all of which belongs into the context.

    Of `modules`, what their operators save is made again when the backward pass first reads some of it. So is every
    result that other operators of the layer save: queries, say, of which attention saves the only copy. Modules may
    start from results of each other, but none may run within another.
    """
    if not modules or not torch.is_grad_enabled():
        yield kept
        return
    layer = _Layer(modules)
    try:
        with saved_tensors_hooks(layer.save, _read):
            yield layer.run
    finally:
        layer.results.clear()  # runs refer to the layer: no cycle is left that would hold their inputs


class _Layer:
    """The runs of one layer. `results`: by address, the storage of each result, its run and its number."""

    def __init__(self, modules: Set[RecomputeModule]):
        self._modules = modules
        self.results: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Run, int]] = {}
        # Hooks do not nest: those around this pass get what this layer keeps.
        self._outer = _autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]

    def run(self, module: RecomputeModule, function: Callable[..., Any], *inputs: Tensor | Rows | None) -> Any:
        if module not in self._modules or not torch.is_grad_enabled():
            return function(*inputs)
        run = _Run(function, [self._input(x) for x in inputs])
        with saved_tensors_hooks(run.save, _read):
            made = function(*inputs)
        given = {_data(x).untyped_storage().data_ptr() for x in inputs if x is not None}
        for number, result in enumerate(_tuple(made)):
            storage = result.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in given:
                self.results[storage.data_ptr()] = weakref.ref(storage), run, number
        return made

    def save(self, x: Tensor) -> _Read:
        """How the backward pass gets a tensor that is saved outside modules."""
        storage = x.untyped_storage()
        held, run, number = self.results.get(storage.data_ptr(), (None, None, 0))
        if run is not None and held is not None and held() is storage:
            run.wanted["result", number] += 1
            return partial(run.view, number, x.size(), x.stride(), x.storage_offset(), x.dtype)
        if self._outer is None:
            return partial(_same, x.detach())
        save, read = self._outer
        return partial(read, save(x))

    def _input(self, x: Tensor | Rows | None) -> Callable[[], Tensor | Rows | None]:
        """How the second run gets an input of the first."""
        if x is None:
            return _nothing
        data = _data(x)
        layout = x.layout if isinstance(x, Rows) else None
        read, learns = self.save(data.detach()), data.requires_grad

        def again() -> Tensor | Rows:
            found = read().detach().requires_grad_(learns)
            return found if layout is None else Rows(found, layout)

        return again


class _Run:
    """One run of a module. `wanted`: how often each tensor is going to be read, those saved within and results."""

    def __init__(self, function: Callable[..., Any], inputs: list[Callable[[], Tensor | Rows | None]]):
        self._function, self._inputs = function, inputs
        self.wanted: Counter[_Key] = Counter()
        self._left: Counter[_Key] = Counter()
        self._made: dict[_Key, Tensor] = {}
        self._saved = 0

    def save(self, x: Tensor) -> _Read:
        """How the backward pass gets a tensor that is saved within the module."""
        key = "within", self._saved
        self._saved += 1
        self.wanted[key] += 1
        return partial(self._take, key)

    def view(self, number: int, shape: Any, stride: Any, offset: Any, dtype: torch.dtype) -> Tensor:
        """A result, or a view of it."""
        return self._take(("result", number)).view(dtype).as_strided(shape, stride, offset)

    def _take(self, key: _Key) -> Tensor:
        """A tensor for one of its readers; nothing is held for longer than the last of them."""
        if key not in self._made:
            self._remake()
        self._left[key] -= 1
        return self._made[key] if self._left[key] else self._made.pop(key)

    def _remake(self) -> None:
        within: list[Tensor] = []

        def save(x: Tensor) -> int:
            within.append(x.detach())  # a tensor with its graph would hold itself
            return len(within)

        with torch.enable_grad(), saved_tensors_hooks(save, _unread):
            results = _tuple(self._function(*(read() for read in self._inputs)))
        if len(within) != self._saved:
            raise RuntimeError(f"a module saved {self._saved} tensors, and {len(within)} when it was computed again")
        made = {("within", number): x for number, x in enumerate(within)}
        made |= {("result", number): x.detach() for number, x in enumerate(results)}
        self._made = {key: made[key] for key in self.wanted}
        self._left = self.wanted.copy()


def _data(x: Tensor | Rows) -> Tensor:
    return x.data if isinstance(x, Rows) else x


def _tuple(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else made


def _read(read: _Read) -> Tensor:
    return read()


def _same(x: Tensor) -> Tensor:
    return x


def _nothing() -> None:
    return None


def _unread(number: int) -> Tensor:
    raise RuntimeError("the second run of a module has no backward pass of its own")
