"""AdamW (model card 8.3) on float32 or bfloat16 state."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw

from undertow.ops.reference.precision import wide
from undertow.optim.host import BESIDE, Keeper, through
from undertow.optim.kernels import available
from undertow.optim.master import read_master, write_master
from undertow.optim.part import Part, batches, gather, scatter, workspace

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw_step(
    parts: list[Part],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    keeper: Keeper = BESIDE,
) -> None:
    """The `step`-th update, counted from 1, of parts of one type and device.

    `w <- w (1 - lr weight_decay) - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)` with the moments
    `exp_avg` m and `exp_avg_sq` v, computed in float32 (float64 for float64 parameters) and rounded to the state's
    types at the end. State on the host, by `keeper`, passes through a batch at a time.
    """
    rule = {"lr": lr, "betas": betas, "epsilon": epsilon, "weight_decay": weight_decay}
    if keeper is BESIDE:
        _step(parts, step, rule)
        return
    for batch in through(batches([piece for part in parts for piece in _pieces(part)]), keeper):
        _step(batch, step, rule)


def _step(parts: list[Part], step: int, rule: dict[str, Any]) -> None:
    if not parts[0].state.keys() - set(MOMENTS):  # nothing beside the weights: all in place
        _update(parts, step, **rule)
        return
    if available(parts[0].weight.device) and _by_kernel(parts, step, rule):
        return
    for batch in batches([piece for part in parts for piece in _pieces(part)]):
        whole = gather(batch)
        _update([whole], step, **rule)
        scatter(whole, batch)


def _by_kernel(parts: list[Part], step: int, rule: dict[str, Any]) -> bool:
    """Take the step in a few launches for all parts; False, and nothing done, if the kernel does not serve them."""
    from undertow.ops.triton.optimizer import adamw as fused

    weights = []
    for part in parts:
        (behind,) = part.state.keys() - set(MOMENTS)
        weights.append(fused.Weights(part.weight, part.grad, *(part.state[key] for key in (*MOMENTS, behind))))
    if fused.refusal(weights) is not None:
        return False
    fused.adamw(weights, step, **rule)
    return True


def _pieces(part: Part) -> list[Part]:
    flat, size = part.cut(lambda tensor: tensor.view(-1)), workspace(part.weight.device)
    return [flat.cut(lambda t, i=i: t[i : i + size]) for i in range(0, len(flat.weight), size)]


def _update(
    parts: list[Part], step: int, lr: float, betas: tuple[float, float], epsilon: float, weight_decay: float
) -> None:
    masters = [read_master(part) for part in parts]
    moments = [[wide(part.state[key]) for part in parts] for key in MOMENTS]
    adamw(
        masters,
        [wide(part.grad) for part in parts],
        *moments,
        max_exp_avg_sqs=[],
        state_steps=list(torch.full((len(parts),), step - 1.0, device=masters[0].device).unbind()),  # one is added
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=False,
    )
    for part, master, *moved in zip(parts, masters, *moments, strict=True):
        write_master(part, master)
        for key, moment in zip(MOMENTS, moved, strict=True):
            if moment is not part.state[key]:
                part.state[key].copy_(moment)
