"""Muon and AdamW as one optimizer: one state, one set of groups, one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from undertow.config.errors import InputError
from undertow.optim.adamw import MOMENTS, adamw_step
from undertow.optim.groups import Entry, Groups
from undertow.optim.host import BESIDE, Host
from undertow.optim.muon import MOMENTUM, muon_step
from undertow.optim.part import Part
from undertow.optim.parted import Parted, parted_step
from undertow.parallel.held import held

Profile = Literal["fp32", "bf16"]
_BESIDE = {"fp32": "master", "bf16": "remainder"}  # what a bfloat16 weight has beside it


class MuonAdamW(torch.optim.Optimizer):
    """Muon for one group of parameters, AdamW for the other; either may be empty.

    State by parameter: `momentum_buffer` (Muon), or `step`, `exp_avg`, `exp_avg_sq` (AdamW). For a bfloat16 parameter
    also, by profile: "fp32" `master`, its float32 weights, and float32 moments; "bf16" `remainder`, the int16 that the
    weight lacks to float32, and bfloat16 moments. Other parameters have moments of their own type under either. A
    parameter without a gradient is left alone, and has no state if it never had one.

    Of a parameter that lies in parts over ranks, a rank has the state of its own part, plain tensors that may have no
    rows. Every rank must take the same steps, with gradients of the same parameters.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        lr: float,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-20,
        momentum: float = 0.95,
        profile: Profile = "fp32",
        muon_dtype: torch.dtype | None = None,
        shard: dist.ProcessGroup | None = None,
        offload: bool = False,
    ) -> None:
        """`muon_dtype` is the type of Muon's iteration: by default bfloat16 on a GPU, float32 elsewhere. `shard` are
        the ranks over which matrices lie in parts. `offload` keeps state in the memory of the host: the same
        numbers, and at the end of a step a wait until they are back there."""
        self._profile, self._muon_dtype, self._shard = profile, muon_dtype, shard
        self._entries: dict[Tensor, Entry] = {entry.parameter: entry for entry in (*groups.muon, *groups.adamw)}
        muon = {"algorithm": "muon", "momentum": momentum}
        adamw = {"algorithm": "adamw", "betas": betas, "epsilon": epsilon}
        own = [
            {"params": [entry.parameter for entry in entries], **rule}
            for entries, rule in ((groups.muon, muon), (groups.adamw, adamw))
            if entries
        ]
        super().__init__(own, {"lr": lr, "weight_decay": weight_decay})
        self._keeper = Host(next(iter(self._entries)).device) if offload else BESIDE
        self.state_device = torch.device("cpu") if offload else None
        """Where state that is loaded belongs; None is where its parameter lies."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient. Raises `InputError` for state of another optimizer or profile."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            active = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["algorithm"] == "muon":
                self._muon(group, active)
            else:
                self._adamw(group, active)
        self._keeper.settle()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state and settings of `state_dict`, every tensor in its own type."""
        super().load_state_dict({**state_dict, "state": {}})  # the base class would round state to the weights' type
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(saved, own, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                device = self.state_device or parameter.device
                self.state[parameter][key] = value.to(device, copy=True) if value.dim() else value.clone()

    def check_state(self) -> None:
        """Raise `InputError` where the state of a parameter is that of another optimizer or profile."""
        for group in self.param_groups:
            moments = (MOMENTUM,) if group["algorithm"] == "muon" else MOMENTS
            for parameter in group["params"]:
                if self.state.get(parameter):
                    self._refuse_foreign(parameter, self._kept(parameter, moments))

    def _kept(self, parameter: nn.Parameter, moments: tuple[str, ...]) -> tuple[str, ...]:
        return (*moments, _BESIDE[self._profile]) if parameter.dtype == torch.bfloat16 else moments

    def _refuse_foreign(self, parameter: nn.Parameter, kept: tuple[str, ...]) -> None:
        state = self.state[parameter]
        if state.keys() - {"step"} != set(kept):
            raise InputError(
                f"optimizer state of {self._entries[parameter].name}: {', '.join(sorted(state))} where this optimizer "
                f"keeps {', '.join(sorted(kept))}; go on with train.optimizer and train.state_profile as saved, or "
                "give the run another directory with out=DIR"
            )

    def _muon(self, group: dict[str, Any], active: list[nn.Parameter]) -> None:
        rule = {"lr": group["lr"], "momentum": group["momentum"], "weight_decay": group["weight_decay"]}
        whole: list[tuple[Part, tuple[int, ...]]] = []
        parted: list[Parted] = []
        for parameter in active:
            part, heights = self._part(parameter, (MOMENTUM,)), self._entries[parameter].heights
            if isinstance(parameter, DTensor) and parameter.dim() == 2:
                rows, width = parameter.shape
                parted.append(Parted(part, rows, width, heights))
            elif part.weight.numel():  # of experts, a rank has whole ones or none
                whole.append((part, heights))
        muon_step(whole, dtype=self._muon_dtype, keeper=self._keeper, **rule)
        if parted:
            if self._shard is None:
                raise ValueError("matrices lie in parts over ranks: give MuonAdamW the group of those, shard")
            parted_step(parted, self._shard, dtype=self._muon_dtype, keeper=self._keeper, **rule)

    def _adamw(self, group: dict[str, Any], active: list[nn.Parameter]) -> None:
        alike: dict[tuple[int, torch.dtype, torch.device], list[Part]] = defaultdict(list)
        for parameter in active:
            part = self._part(parameter, MOMENTS)
            step = int(self.state[parameter]["step"].add_(1))
            if part.weight.numel():
                alike[step, parameter.dtype, parameter.device].append(part)
        for (step, _, _), parts in alike.items():
            adamw_step(
                parts,
                step,
                lr=group["lr"],
                betas=group["betas"],
                epsilon=group["epsilon"],
                weight_decay=group["weight_decay"],
                keeper=self._keeper,
            )

    def _part(self, parameter: nn.Parameter, moments: tuple[str, ...]) -> Part:
        """A parameter with its gradient and state, fresh state if it has none."""
        assert parameter.grad is not None
        state, weight = self.state[parameter], held(parameter.detach())
        low = parameter.dtype == torch.bfloat16
        kept = self._kept(parameter, moments)
        if not state:
            moment = torch.float32 if low and self._profile == "fp32" else parameter.dtype
            state.update({key: torch.zeros_like(weight, dtype=moment) for key in moments})
            if moments == MOMENTS:
                state["step"] = torch.zeros(())  # stays on the host: reading it does not wait for a GPU
            if low:
                state[kept[-1]] = weight.float() if self._profile == "fp32" else torch.zeros_like(weight).short()
        else:
            self._refuse_foreign(parameter, kept)
        state.update({key: self._keeper.home(state[key]) for key in kept})
        return Part(weight, held(parameter.grad).contiguous(), {key: state[key] for key in kept})
