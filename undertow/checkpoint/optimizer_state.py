"""The state of an optimizer, and of torch's random generators, as named tensors: `parameter/part` and `random/device`.

A part called `step` is a scalar; every other part has the shape of its parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from undertow.checkpoint.faults import Faults
from undertow.config.errors import InputError

_RANDOM, _STEP = "random", "step"
_GENERATORS = re.compile(r"cpu|cuda:[0-9]{1,4}")
_INTEGERS = {"remainder": torch.int16}  # the parts that are no floating-point numbers


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter that has one, and of the random generators, by name."""
    moments = {
        f"{name}/{part}": value
        for name, parameter in model.named_parameters()
        for part, value in optimizer.state.get(parameter, {}).items()
    }
    generators = {f"{_RANDOM}/cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        generators |= {f"{_RANDOM}/cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return moments | generators


def read_optimizer(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Fill `optimizer` and the random generators from `file`, which was written with the tensors `names`.

    Raises one `InputError` for everything that is wrong with the file, before anything is changed.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            found = {key: handle.get_tensor(key).clone() for key in handle.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: damaged ({error}); resume from an earlier checkpoint") from None
    parameters = dict(model.named_parameters())
    faults, wanted = Faults(file, "damaged"), {f"{_RANDOM}/cpu", *map(str, names)}
    for key in sorted(wanted - found.keys()):
        faults.add("missing", key)
    for key, value in found.items():
        name, _, part = key.rpartition("/")
        known = _GENERATORS.fullmatch(part) if name == _RANDOM else name in parameters
        if key not in wanted or not known:
            faults.add("surplus", key)
        elif name == _RANDOM:
            _check_generator(key, part, value, faults)
        else:
            _check_part(key, part, value, parameters[name], faults)
    faults.raise_if_any("; resume from an earlier checkpoint")
    for key, value in found.items():
        name, _, part = key.rpartition("/")
        if name == _RANDOM:
            _restore_generator(part, value)
        else:  # A step count stays where the optimizer keeps it; moments lie with their parameter.
            parameter = parameters[name]
            optimizer.state[parameter][part] = value if part == _STEP else value.to(parameter.device)


def _check_part(key: str, part: str, value: Tensor, parameter: nn.Parameter, faults: Faults) -> None:
    shape = torch.Size() if part == _STEP else parameter.shape
    allowed = (_INTEGERS[part],) if part in _INTEGERS else (torch.float32, parameter.dtype)
    if value.shape != shape:
        faults.add("misshapen", f"{key} is {list(value.shape)}, {list(shape)} is expected")
    elif value.dtype not in allowed:
        said = " or ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in allowed))
        faults.add("of a wrong type", f"{key} is {str(value.dtype).removeprefix('torch.')}, {said} is expected")
    elif not bool(torch.isfinite(value).all()):
        faults.add("not finite", key)


def _check_generator(key: str, device: str, state: Tensor, faults: Faults) -> None:
    if _is_here(device):
        try:
            torch.Generator(device).set_state(state)
        except (RuntimeError, TypeError):
            faults.add("no state of a random generator", f"{key} {list(state.shape)}")


def _restore_generator(device: str, state: Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    elif _is_here(device):
        torch.cuda.set_rng_state(state, device)


def _is_here(device: str) -> bool:
    return device == "cpu" or int(device.partition(":")[2]) < torch.cuda.device_count()
