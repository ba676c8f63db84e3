"""Steps of the optimizer on bfloat16 weights, with state in float32 (30 bytes an element moved) and in bfloat16 (18).

A step changes what it is given, so that every way has a copy of its own; its first step is the one that is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from undertow.bench.operation import moved, normal
from undertow.bench.task import OWN, PEER, Absent, Run, Task, Way, relative
from undertow.bench.work import Work
from undertow.optim.adamw import MOMENTS, adamw_step
from undertow.optim.kernels import available
from undertow.optim.master import read_master, split_master
from undertow.optim.muon import MOMENTUM, UPDATE_RMS, muon_step
from undertow.optim.orthogonal import SCHEDULE, orthogonalise
from undertow.optim.part import Part


@dataclass(frozen=True)
class Sizes:
    """Elements that AdamW updates; experts, height and width of the two matrices of each that Muon does."""

    elements: int
    experts: int
    height: int
    width: int


FLASH = Sizes(129280 * 2048, 16, 2048, 4096)
TINY = Sizes(5000, 2, 16, 32)
"""The same for a CPU."""
PROFILES = ("fp32", "bf16")
_ADAMW: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1}
_MUON: Mapping[str, Any] = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1}
_STEP = 3
_JUDGED = 2  # experts whose update is compared


class State:
    """Seeded weights, gradients and state of one profile, and the weights behind them in float32."""

    def __init__(self, shape: tuple[int, ...], profile: str, held: Collection[str], device: torch.device) -> None:
        kind = torch.float32 if profile == "fp32" else torch.bfloat16
        master = 0.02 * normal(*shape, device=device, seed=1, like=torch.float32)
        grad = (1e-3 * normal(*shape, device=device, seed=2, like=torch.float32)).to(kind)
        state = {key: 1e-3 * normal(*shape, device=device, seed=3 + i, like=kind) for i, key in enumerate(held)}
        if MOMENTS[1] in state:
            state[MOMENTS[1]] = state[MOMENTS[1]].square()
        weight, behind = split_master(master)
        if profile == "fp32":
            state["master"], weight = master, master.bfloat16()
        else:
            state["remainder"] = behind
        self.part, self.profile = Part(weight, grad, state), profile

    @property
    def work(self) -> int:
        """Bytes of a step: gradients read, state and master read and written, weights written, and read where they
        are the upper half of the master."""
        p = self.part
        return moved(p.grad) + 2 * moved(*p.state.values()) + moved(p.weight) * (1 if "master" in p.state else 2)

    def error(self, found: Part, update: Tensor, moments: Mapping[str, Tensor], first: int) -> float:
        """Of the update of the master, which is small beside it, and of the moments, on the first rows."""
        part = found.cut(lambda x: x[:first])
        taken = read_master(part) - read_master(self.part.cut(lambda x: x[:first]))
        apart = [relative(part.state[key].float(), value) for key, value in moments.items()]
        return max(relative(taken, update), *apart)


def optimizer_tasks(s: Sizes, device: torch.device, peers: Collection[str]) -> Iterator[Task]:
    """AdamW on one large parameter and Muon on a stack of experts, in both profiles of state. Timed by calls, as a
    training step makes them."""
    for profile in PROFILES:
        yield _adamw_task(s, profile, device, peers)
    for profile in PROFILES:
        yield _muon_task(s, profile, device, peers)


def _ways(state: State, step: Callable[[Part], Any], peers: Collection[str], limit: float) -> dict[str, Way]:
    """The step as training takes it, which is that of our kernels on a GPU and of torch elsewhere."""
    device = state.part.weight.device

    def way(wanted: bool) -> Callable[[], Run]:
        def build() -> Run:
            if available(device) != wanted:
                raise Absent("triton kernels run on a GPU" if wanted else "on this GPU a step is that of the kernels")
            part = state.part.cut(torch.clone)

            def run() -> Part:
                step(part)
                return part

            return run

        return build

    ways = {"triton": Way(way(True), limit)}
    return ways | ({"reference": Way(way(False), max(limit, PEER))} if "reference" in peers else {})


def _adamw_task(s: Sizes, profile: str, device: torch.device, peers: Collection[str]) -> Task:
    state = State((s.elements,), profile, MOMENTS, device)

    def error(found: Part) -> float:
        update, moments = adamw_update(state.part)
        return state.error(found, update, dict(zip(MOMENTS, moments, strict=True)), s.elements)

    ways = _ways(state, lambda part: adamw_step([part], _STEP, **_ADAMW), peers, OWN)
    if "torch" in peers and profile == "fp32":
        ways["torch"] = Way(_torch_adamw(state), PEER)
    work = Work(state.work)
    return Task(f"adamw with {profile} state", f"{s.elements} elements", work, error, ways, captured=False)


def adamw_update(part: Part) -> tuple[Tensor, list[Tensor]]:
    """Change of the master and the new moments, in float32 by the definition."""
    grad, (one, two), lr = part.grad.float(), _ADAMW["betas"], _ADAMW["lr"]
    first = part.state[MOMENTS[0]].float() * one + grad * (1 - one)
    second = part.state[MOMENTS[1]].float() * two + grad.square() * (1 - two)
    root = (second / (1 - two**_STEP)).sqrt_().add_(_ADAMW["epsilon"])
    decay = read_master(part) * (-lr * _ADAMW["weight_decay"])
    return decay - lr / (1 - one**_STEP) * first / root, [first, second]


def _torch_adamw(state: State) -> Callable[[], Run]:
    def build() -> Run:
        part = state.part.cut(torch.clone)
        master, moments = part.state["master"], [part.state[key] for key in MOMENTS]
        count = torch.tensor(_STEP - 1.0, device=master.device)

        def run() -> Part:
            # Its weights are float32, and stay so: 28 bytes an element.
            adamw(
                [master], [part.grad], [moments[0]], [moments[1]], [], [count], fused=True, amsgrad=False,
                beta1=_ADAMW["betas"][0], beta2=_ADAMW["betas"][1], lr=_ADAMW["lr"],
                weight_decay=_ADAMW["weight_decay"], eps=_ADAMW["epsilon"], maximize=False,
            )  # fmt: skip
            return part

        return run

    return build


def _muon_task(s: Sizes, profile: str, device: torch.device, peers: Collection[str]) -> Task:
    state = State((s.experts, 2 * s.height, s.width), profile, (MOMENTUM,), device)
    heights = (s.height, s.height)

    def error(found: Part) -> float:
        update, buffer = muon_update(state.part.cut(lambda x: x[:_JUDGED]), heights)
        return state.error(found, update, {MOMENTUM: buffer}, _JUDGED)

    # The iteration is in bfloat16 on a GPU, six thousandths off one in float32.
    ways = _ways(state, lambda part: muon_step([(part, heights)], **_MUON), peers, PEER)
    short, long = sorted((s.height, s.width))
    steps = len(SCHEDULE) * 2 * s.experts
    # Two of the three products are symmetric: half of their elements are enough.
    nominal = steps * (4.0 * short * short * long + 2.0 * short**3)
    work = Work(state.work, steps * (3.0 * short * short * long + short**3), nominal)
    shape = f"{s.experts} experts of 2 x {s.height} x {s.width}"
    return Task(f"muon with {profile} state", shape, work, error, ways, captured=False)


def muon_update(part: Part, heights: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Change of the master and the new momentum, in float32 by the definition."""
    momentum, lr = _MUON["momentum"], _MUON["lr"]
    grad = part.grad.float()
    buffer = part.state[MOMENTUM].float() * momentum + grad
    directions = (grad + momentum * buffer).split(heights, 1)
    steps = [orthogonalise(x, torch.float32) * (lr * UPDATE_RMS * math.sqrt(max(x.shape[1:]))) for x in directions]
    return read_master(part) * (-lr * _MUON["weight_decay"]) - torch.cat(steps, 1), buffer
