"""The state of an optimizer, and of torch's random generators, as named tensors: `parameter/part` and `random/device`.

A part called `step` is a scalar; every other part has the shape of its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from undertow.checkpoint.faults import Faults
from undertow.checkpoint.generators import (
    RANDOM,
    check_generator,
    generator_tensors,
    generators_for,
    is_generator,
    restore_generator,
)
from undertow.checkpoint.names import native_tensors
from undertow.checkpoint.shards import listed_files
from undertow.config.errors import InputError
from undertow.model.transformer import Transformer

if TYPE_CHECKING:  # they import torch.distributed, which takes a while
    from undertow.checkpoint.shares import Share
    from undertow.parallel.mesh import Mesh

OPTIMIZER = "optimizer.safetensors"
INDEX = "optimizer.safetensors.index.json"
_STEP = "step"
_INTEGERS = {"remainder": torch.int16}  # the parts that are no floating-point numbers
_MEND = "resume from an earlier checkpoint"


def optimizer_tensors(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter that has one, and of the random generators, by name: all of it in one process."""
    moments = {
        f"{name}/{part}": value
        for name, parameter in model.named_parameters()
        for part, value in optimizer.state.get(parameter, {}).items()
    }
    return moments | generator_tensors()


def read_optimizer(
    directory: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    names: Iterable[str],
    shares: Mapping[str, Share],
    mesh: Mesh | None = None,
) -> Callable[[], None]:
    """Read what is held here of the state of `optimizer`, and random states; return what puts it in its place.

    The files of `directory` were written with the tensors `names`; `shares` are the weights' of `weight_shares`. Raises
    one `InputError` for everything that is wrong with the files.
    """
    single = not (directory / INDEX).exists()
    files = [OPTIMIZER] if single else list(listed_files(directory, INDEX))
    wanted, parameters = {f"{RANDOM}/cpu", *map(str, names)}, dict(model.named_parameters())
    elsewhere = native_tensors(model.config).keys() - shares.keys()
    faults = Faults(directory / (OPTIMIZER if single else INDEX), "damaged")
    with ExitStack() as stack:
        found = {key: (handle, directory / file) for file in files for key, handle in _opened(directory / file, stack)}
        for key in sorted(wanted - found.keys()):
            faults.add("missing", key)
        mine, moments, states = generators_for(found, mesh), {}, {}
        for key, (handle, file) in found.items():
            name = key.rpartition("/")[0]
            if key not in wanted or not (is_generator(key) or name in parameters or name in elsewhere):
                faults.add("surplus", key)
                continue
            try:
                if key in mine:
                    states[key] = handle.get_tensor(key).clone()
                    check_generator(key, mine[key], states[key], faults)
                elif name in parameters and (value := _rows(handle, key, shares[name], faults)) is not None:
                    moments[key] = value
                    _check_part(key, value, parameters[name].dtype, faults)
            except (SafetensorError, OSError) as error:
                raise _damaged(file, error) from None
    faults.raise_if_any(f"; {_MEND}")

    def restore() -> None:
        for key, state in states.items():
            restore_generator(mine[key], state)
        for key, value in moments.items():
            name, _, part = key.rpartition("/")
            parameter = parameters[name]
            # A step count stays where the optimizer keeps it; moments lie with their parameter, or on the host.
            device = getattr(optimizer, "state_device", None) or parameter.device
            optimizer.state[parameter][part] = value if part == _STEP else value.to(device)

    return restore


def _opened(file: Path, stack: ExitStack) -> list[tuple[str, Any]]:
    try:
        handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        return [(key, handle) for key in handle.keys()]  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> InputError:
    return InputError(f"{file}: damaged ({error}); {_MEND}")


def _rows(handle: Any, key: str, share: Share, faults: Faults) -> Tensor | None:
    """The part of a tensor that belongs to `share`, in memory of its own; None for one of another shape."""
    shape = [] if key.rpartition("/")[2] == _STEP else list(share.whole)
    piece = handle.get_slice(key)
    if piece.get_shape() != shape:
        faults.add("misshapen", f"{key} is {piece.get_shape()}, {shape} is expected")
        return None
    return (piece[share.rows] if shape else handle.get_tensor(key)).clone()


def _check_part(key: str, value: Tensor, weight: torch.dtype, faults: Faults) -> None:
    part = key.rpartition("/")[2]
    allowed = (_INTEGERS[part],) if part in _INTEGERS else (torch.float32, weight)
    if value.dtype not in allowed:
        said = " or ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in allowed))
        faults.add("of a wrong type", f"{key} is {str(value.dtype).removeprefix('torch.')}, {said} is expected")
    elif not bool(torch.isfinite(value).all()):
        faults.add("not finite", key)
