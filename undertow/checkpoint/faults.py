"""What is wrong with a checkpoint, gathered so that one message tells everything."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from undertow.checkpoint.names import Expected, scale_name
from undertow.checkpoint.packed import is_low
from undertow.checkpoint.shards import Header
from undertow.config.errors import InputError
from undertow.config.spelling import some

_FLOATS = ("F64", "F32", "BF16", "F16")
_INTEGERS = ("I64", "I32")
_SHOWN, _LONGEST = 3, 200


class Faults:
    """Faults by kind. `raise_if_any` puts the count and the first names of each kind into one `InputError`."""

    def __init__(self, where: object, verdict: str = "tensors do not fit the configuration"):
        self.where, self.verdict = where, verdict
        self._found: dict[str, list[str]] = {}

    def add(self, kind: str, text: str) -> None:
        """Note a fault: `kind` reads after a count ("missing"), `text` names the tensor."""
        self._found.setdefault(kind, []).append(text)

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_if_any(self, hint: str = "") -> None:
        """Raise `InputError` unless nothing was found; `hint` is the mend."""
        if self._found:
            said = [f"{len(names)} {kind} ({some(names, _SHOWN, _LONGEST)})" for kind, names in self._found.items()]
            raise InputError(f"{self.where}: {self.verdict}: {'; '.join(said)}{hint}")


def compare(headers: Mapping[str, Header], expected: Mapping[str, Expected], faults: Faults) -> set[str]:
    """Note what is missing, surplus, misshapen or of a wrong type; return the names of the tensors that fit.

    FP8 and FP4 weights fit if they have scales: shapes are judged with them, by `undertow.checkpoint.packed.describe`.
    """
    fitting, scales = set(), set()
    for name, (shape, kind) in expected.items():
        if name not in headers:
            faults.add("missing", name)
            continue
        header = headers[name]
        if kind == "weight" and is_low(header):
            scales.add(scale_name(name))
            if scale_name(name) in headers:
                fitting.add(name)
            else:
                faults.add("without a scale", f"{name} is {header.dtype}, which needs {scale_name(name)}")
            continue
        allowed = _INTEGERS if kind == "index" else _FLOATS
        if header.shape != shape:
            faults.add("misshapen", f"{name} is {list(header.shape)}, {list(shape)} is expected")
        elif header.dtype not in allowed:
            faults.add("of a wrong type", f"{name} is {header.dtype}, one of {', '.join(allowed)} is expected")
        else:
            fitting.add(name)
    for name in headers:
        if name not in expected and name not in scales:
            faults.add("surplus", name)
    return fitting


def mtp_hint(headers: Mapping[str, Header], expected: Mapping[str, Expected], depth: int) -> str:
    """The mend where the MTP blocks of the file and of the configuration (`depth` of them) differ, else nothing."""
    held = {name.split(".")[1] for name in headers if name.startswith("mtp.")}
    wanted = {name.split(".")[1] for name in expected if name.startswith("mtp.")}
    if held == wanted:
        return ""
    if len(held) > 1:
        return f"; the files hold {len(held)} MTP blocks, a later refresh of the family that Undertow does not build"
    drops = "" if held else "; transformers drops them when it saves"
    mend = f"set num_nextn_predict_layers to {len(held)}"
    return f"; the files hold {len(held)} MTP blocks, config.json says {depth}{drops}: {mend}"


def check_values(name: str, tensor: torch.Tensor, kind: str, experts: int, faults: Faults) -> None:
    """Note floating-point values that are not finite, and hash tables that do not name distinct experts.

    `tensor` is in the file's own dtype; a hash table is `[V, K]` with entries in `[0, experts)`.
    """
    if kind != "index":
        if not bool(torch.isfinite(tensor).all()):
            faults.add("not finite", name)
        return
    if bool((tensor < 0).any()) or bool((tensor >= experts).any()):
        faults.add(
            "with experts out of range", f"{name} holds {_outside(tensor, experts)}, 0 to {experts - 1} are allowed"
        )
        return
    ordered = tensor.sort(dim=-1).values
    unfilled = experts > 1 and not bool(tensor.any())
    if unfilled or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        state = (
            "is unfilled, all zeros as transformers initialises it" if unfilled else "names an expert twice in a row"
        )
        faults.add(
            "unusable hash table" if unfilled else "repeating hash table", f"{name} {state}; fill it before saving"
        )


def _outside(tensor: torch.Tensor, experts: int) -> int:
    outside = tensor[(tensor < 0) | (tensor >= experts)]
    return int(outside[0])
