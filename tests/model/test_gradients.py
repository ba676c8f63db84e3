"""Gradients stay finite and right where rounding, padding and saturation could break them: bfloat16 against float64.

Choices of experts and entries are those of the model under test in both, so that only arithmetic is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.model.small import small_config, stirred, tokens
from undertow.config.model import ModelConfig
from undertow.model.batch import flatten
from undertow.model.build import build_model
from undertow.model.transformer import Transformer

CONFIG = small_config()
Gradients = dict[str, Tensor]


class Pass(NamedTuple):
    """Gradients in float64, divided by the upstream factor, and the choices made on the way."""

    gradients: Gradients
    experts: list[Tensor]
    entries: list[Tensor]


def padded_batch() -> tuple[Tensor, Tensor]:
    """Left padding, right padding, a row that is padding alone, and a full row."""
    mask = torch.ones(4, 40, dtype=torch.int64)
    mask[0, :9] = 0
    mask[1, -7:] = 0
    mask[2] = 0
    return tokens(CONFIG, 4, 40), mask


def noise(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, CONFIG.vocab_size, generator=torch.Generator().manual_seed(seed))


def backward(model: Transformer, upstream: float = 1.0, chosen: Pass | None = None) -> Pass:
    """Backward from random gradients of size `upstream` at every logit, the MTP block's too."""
    model.zero_grad()
    ids, mask = padded_batch()
    batch = flatten(ids, CONFIG.vocab_size, mask)
    entries, replay = [], iter(chosen.entries if chosen else ())

    def keep(_, __, made):
        entries.append(next(replay) if chosen else made)
        return entries[-1]

    handles = [block.attn.indexer.register_forward_hook(keep) for block in model.layers if block.attn.kind == "csa"]
    trunk = model.trunk(batch.ids, batch.segments, replay=chosen.experts if chosen else None)
    for handle in handles:
        handle.remove()
    logits = model.logits(model.collapse(trunk.streams))
    drafts = model.logits(model.mtp_hidden(trunk.streams, batch.ids, batch.segments)[0])
    heads = ((logits * noise(len(logits), 1)).mean() + (drafts * noise(len(drafts), 2)).mean()) * upstream
    heads.backward()
    gradients = {n: p.grad.double() / upstream for n, p in model.named_parameters() if p.grad is not None}
    return Pass(gradients, [route.indices for route in trunk.routes], entries)


def finite(gradients: Gradients) -> bool:
    return all(bool(g.isfinite().all()) for g in gradients.values())


def distance(got: Gradients, wanted: Gradients) -> float:
    """Norm of the difference of all gradients together, relative."""
    error = sum((got[name] - wanted[name]).square().sum() for name in wanted)
    return float((error / sum(g.square().sum() for g in wanted.values())).sqrt())


def nothing(model: Transformer) -> None:
    pass


def noisy(model: Transformer, ends: tuple[str, ...], size: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(ends):
            tensor.copy_(size * torch.randn(tensor.shape, generator=generator))


def sinkhorn(size: float) -> Callable[[Transformer], None]:
    """Stream weights far out in their sigmoids, mixing matrices near permutations."""

    def saturate(model: Transformer) -> None:
        noisy(model, ("hc_attn.base", "hc_ffn.base", "hc_head.base"), size)
        for name, parameter in model.named_parameters():
            if name.endswith(("hc_attn.scale", "hc_ffn.scale", "hc_head.scale")):
                parameter.fill_(size)

    return saturate


def routers(model: Transformer) -> None:
    """Scores whose softplus underflows beside others that are linear."""
    noisy(model, ("gate.weight",), 100.0)


def sinks(model: Transformer) -> None:
    """Sinks that take all of the attention, or none."""
    noisy(model, (".attn_sink",), 1e4)


def gates(model: Transformer) -> None:
    """Compressor windows in which one token takes all of the weight."""
    noisy(model, (".ape",), 1e4)


SATURATED = {
    "fresh": nothing, "sinkhorn 30": sinkhorn(30), "sinkhorn 300": sinkhorn(300), "sinkhorn 10000": sinkhorn(1e4),
    "routers": routers, "sinks": sinks, "gates": gates,
}  # fmt: skip


def built(name: str, dtype: torch.dtype) -> Transformer:
    model = stirred(CONFIG, dtype=dtype)
    with torch.no_grad():
        SATURATED[name](model)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SATURATED)
def test_gradients_are_finite(name, dtype):
    model = built(name, dtype)
    for upstream in (1.0, 1e6):
        gradients = backward(model, upstream).gradients
        assert finite(gradients)
        assert len(gradients) == sum(".indexer." not in n for n, _ in model.named_parameters())


# Rounding alone, by norm: 8 bits in bfloat16, 24 in float32; steep routers and near-permutations amplify it.
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [
        ("fresh", torch.bfloat16, 0.02), ("fresh", torch.float32, 2e-6),
        ("sinkhorn 30", torch.bfloat16, 0.04), ("sinkhorn 30", torch.float32, 5e-6),
        ("sinkhorn 300", torch.float32, 1e-3), ("routers", torch.float32, 5e-4),
        ("sinks", torch.bfloat16, 0.04), ("sinks", torch.float32, 2e-5),
        ("gates", torch.bfloat16, 0.04), ("gates", torch.float32, 2e-5),
    ],
)  # fmt: skip
def test_gradients_are_those_of_float64_at_any_upstream_size(name, dtype, bound):
    model = built(name, dtype)
    exact = copy.deepcopy(model).double()
    control = None
    for upstream in (1.0, 1e6):
        got = backward(model, upstream)
        error = distance(got.gradients, backward(exact, upstream, got).gradients)
        assert error <= bound, upstream
        # As far off at 1e6 as at 1: nothing overflows, nothing is clipped.
        control = error if control is None else control
        assert error <= 1.5 * control + 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_power_of_two_upstream_changes_no_bit(dtype):
    model = built("fresh", dtype)
    once, scaled = backward(model).gradients, backward(model, 2.0**20).gradients
    assert [name for name in once if not torch.equal(once[name], scaled[name])] == []


def test_padding_changes_no_gradient():
    model = built("fresh", torch.float32)
    ids, mask = padded_batch()
    model(ids, attention_mask=mask).square().sum().backward()
    padded = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for row, kept in zip(ids, mask.bool(), strict=True):
        if kept.any():
            model(row[kept][None]).square().sum().backward()
    separate = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert distance(padded, separate) <= 1e-6


def test_a_batch_of_padding_alone_gives_zero_gradients():
    model = built("fresh", torch.bfloat16)
    ids, _ = padded_batch()
    out = model(ids, attention_mask=torch.zeros_like(ids), return_mtp=True)
    (out.logits.sum() + out.mtp_logits.sum()).backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_gradients_are_reproducible_with_several_threads():
    """A sum that threads share out differently from run to run would break resuming to the bit."""
    config = ModelConfig.from_preset("v4-tiny")
    model = build_model(config)
    ids = torch.randint(0, config.vocab_size, (2, 400), generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(2)
    runs = []
    try:
        for _ in range(3):
            model.zero_grad()
            out = model(ids, return_mtp=True)
            (out.logits.logsumexp(-1).mean() + out.mtp_logits.square().mean()).backward()
            runs.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    finally:
        torch.set_num_threads(1)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
