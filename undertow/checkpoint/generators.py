"""The state of torch's random generators as named tensors: `random/cpu`, `random/cuda:0`, and `random.3/cpu` of rank 3.

Nothing in training draws from them. Of several ranks each keeps its own, of the one device that it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from undertow.checkpoint.faults import Faults

if TYPE_CHECKING:  # it imports torch.distributed, which takes a while
    from undertow.parallel.mesh import Mesh

RANDOM = "random"
_OWNER = re.compile(r"random(?:\.([1-9][0-9]{0,6}))?")
_DEVICE = re.compile(r"cpu|cuda:[0-9]{1,4}")


def generator_tensors(mesh: Mesh | None = None) -> dict[str, Tensor]:
    """The states here, by name: of all devices in one process, of this rank's own over `mesh`."""
    owner = RANDOM if mesh is None or mesh.rank == 0 else f"{RANDOM}.{mesh.rank}"
    states = {f"{owner}/cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        devices = torch.cuda.get_rng_state_all() if mesh is None else [torch.cuda.get_rng_state()]
        states |= {f"{owner}/cuda:{i}": state for i, state in enumerate(devices)}
    return states


def is_generator(key: str) -> bool:
    """Whether a name is one that `generator_tensors` gives."""
    owner, _, device = key.rpartition("/")
    return bool(_OWNER.fullmatch(owner) and _DEVICE.fullmatch(device))


def generators_for(names: Iterable[str], mesh: Mesh | None) -> dict[str, str]:
    """Which of the generators in a checkpoint this process takes, each with the device here that it is for.

    A rank takes its own from a checkpoint of as many ranks, else those of rank 0, as one process does.
    """
    held: dict[int, list[str]] = {}
    for key in names:
        owner, _, device = key.rpartition("/")
        if (found := _OWNER.fullmatch(owner)) and _DEVICE.fullmatch(device):
            held.setdefault(int(found[1] or 0), []).append(device)
    mine = mesh.rank if mesh is not None and max(held, default=0) + 1 == mesh.axes.geometry.gpus else 0
    owner = f"{RANDOM}.{mine}" if mine else RANDOM
    if mesh is None:
        return {f"{owner}/{device}": device for device in held.get(mine, []) if _is_here(device)}
    own = {"cpu": "cpu"} | ({"cuda:0": f"cuda:{torch.cuda.current_device()}"} if torch.cuda.is_available() else {})
    return {f"{owner}/{device}": own[device] for device in held.get(mine, []) if device in own}


def check_generator(key: str, device: str, state: Tensor, faults: Faults) -> None:
    """Note a `state` that the generator of `device` cannot take."""
    try:
        torch.Generator(device).set_state(state)
    except (RuntimeError, TypeError):
        faults.add("no state of a random generator", f"{key} {list(state.shape)}")


def restore_generator(device: str, state: Tensor) -> None:
    """Give the generator of `device` its `state`."""
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def _is_here(device: str) -> bool:
    return device == "cpu" or int(device.partition(":")[2]) < torch.cuda.device_count()
