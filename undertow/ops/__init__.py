"""Operators: what the model computes with, each one name over interchangeable backends.

`Ops` is the table a model is built with: the wanted backend of each operator and whether results must be
batch-invariant. Its attributes are the operators, `ops.rms_norm(x, weight, eps)`; signatures and shapes are those of
`undertow.ops.reference`, which is the definition of every one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from undertow.ops.calls import Calls
from undertow.ops.registry import OPS, Choice, explain, function
from undertow.ops.segments import Segments

__all__ = ["OPS", "Choice", "Ops", "Segments", "explain"]


class Ops:
    """Operators of one model on one device.

    `choices` maps operator names to backends (`auto` where absent); an unknown name or a backend that cannot serve
    raises `InputError` here, not in the middle of a step. A call that a kernel does not serve, by its types or shapes,
    goes to the next backend under `auto`, and raises `InputError` if the kernel's backend was named; `calls` counts
    them and keeps the reasons. With `batch_invariant` every row's result has the same bits whatever shares the call:
    other documents, other chunks, padding.
    """

    # One attribute per operator of the registry; calls are typed by the reference functions' signatures.
    def __init__(
        self,
        choices: Mapping[str, str] | None = None,
        *,
        batch_invariant: bool = False,
        device: str | torch.device = "cpu",
    ):
        self.batch_invariant = batch_invariant
        found = explain(device, choices, invariant=batch_invariant)
        self.choices: dict[str, Choice] = {choice.op: choice for choice in found}
        self.calls = Calls()
        self._functions: dict[str, Callable[..., Any]] = {
            choice.op: function(choice, batch_invariant, self.calls) for choice in found
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        functions = self.__dict__.get("_functions", {})
        if name in functions:
            return functions[name]
        raise AttributeError(f"no operator '{name}' (known: {', '.join(OPS)})")

    def __repr__(self) -> str:
        return f"Ops(batch_invariant={self.batch_invariant})"
