"""Seconds from rates of operators: bytes as the bench counts them, seconds by hand, and what a plan makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from undertow.bench import experts, fusions
from undertow.config.model import ModelConfig
from undertow.planner.timing import operators
from undertow.planner.timing.costs import MicrobatchShape, model_times
from undertow.planner.timing.operators import EXPERTS, MOVERS, PRODUCTS, OperatorRates, head_seconds, layer_seconds
from undertow.planner.timing.rates import Core, Figure, Rates

FLASH = ModelConfig.from_preset("v4-flash")
TOKENS = 256
KINDS = {"swa": 0, "csa": 4, "hca": 3}


def flat(products: float = 1e15, bytes_: float = 1e12, per: float = 768.0) -> OperatorRates:
    """Every product at one rate, every other operator at another."""
    rates = {name: Figure(products, "measured", name) for name in PRODUCTS}
    rates |= {name: Figure(bytes_, "measured", name) for name in MOVERS}
    return OperatorRates(rates, {per: {name: Figure(products, "measured", name) for name in EXPERTS}})


def measured() -> dict[str, int]:
    """Bytes of the tasks of the bench at the widths of v4-flash, forward and backward."""
    device, lengths = torch.device("cpu"), (TOKENS,)
    plain = fusions.norm_tasks, fusions.rotary_tasks, fusions.hyper_tasks, fusions.pool_tasks, fusions.swiglu_tasks
    makes = [make(fusions.FLASH, lengths, device, ()) for make in plain]
    makes += [make(fusions.FLASH, 256, lengths, device, ()) for make in (experts.router_tasks, experts.permute_tasks)]
    return {task.op: task.work.bytes for tasks in makes for task in tasks if task.op != "router and order"}


def test_bytes_are_those_of_the_bench():
    bench = measured()
    found: dict[str, float] = {}
    for layer in KINDS.values():
        for _, (name, forward, backward) in operators._moved(FLASH, layer, TOKENS):
            found |= {f"{name} forward": forward, f"{name} backward": backward}
    # A layer norms latents and not rows of the width; it turns heads, latents and the indexer's queries besides; its
    # shared expert has an activation too.
    found |= {"norm forward": 4 * TOKENS * 4096, "norm backward": 6 * TOKENS * 4096}
    found |= dict.fromkeys(("rotary forward", "rotary backward"), 4 * TOKENS * 64 * 512)
    found |= {name: found[name] * 6 / 7 for name in ("swiglu forward", "swiglu backward")}
    assert set(found) | {"order"} | {f"norm of heads {way}" for way in ("forward", "backward")} == set(bench)
    # What is left out are weights and tables, of which few tokens have relatively more.
    small = {"hyper in forward": 0.15, "hyper in backward": 0.12, "pool hca forward": 0.2, "pool hca backward": 0.2}
    for name, size in found.items():
        assert size == pytest.approx(bench[name], rel=small.get(name, 0.02)), name
        assert size <= bench[name] * 1.0001, name


@pytest.mark.parametrize(
    ("kind", "flops"), [("swa", (876.2, 0, 0)), ("csa", (876.2, 68.7, 122.4)), ("hca", (876.2, 34.4, 0))]
)
def test_products_of_a_layer(kind, flops):
    """GFLOP of the published table, at 10^15 operations a second and with memory of no cost."""
    shape = MicrobatchShape(FLASH, 4096, expert=8)
    found = layer_seconds(shape, flat(bytes_=1e30), KINDS[kind])
    for term, giga in zip(("projections", "compressor"), flops, strict=False):
        assert found[term].forward == pytest.approx(giga * 1e-6, rel=2e-3)
        assert (found[term].backward, found[term].weight) == pytest.approx((2 * giga * 1e-6, giga * 1e-6), rel=2e-3)
    gate = 0 if kind == "swa" else 8.6  # layer 0 takes experts by token
    assert found["moe"].forward == pytest.approx((1443.1 + gate) * 1e-6, rel=1e-3)
    assert found["moe"].backward == pytest.approx(2 * found["moe"].forward)
    assert found["mixers"].forward < 1e-12
    if kind == "csa":  # 1,572,352 chosen entries, of 65,536 + 16,384 operations
        distillation = 1_572_352 * 81_920 / 1e15
        assert found["indexer"].forward == pytest.approx(flops[2] * 1e-6 + distillation, rel=1e-3)
        assert found["indexer"].weight == pytest.approx((flops[2] - 34.343) * 1e-6, rel=1e-2)
        frozen = layer_seconds(replace(shape, frozen_indexer=True), flat(bytes_=1e30), KINDS[kind])["indexer"]
        assert frozen.forward == pytest.approx(flops[2] * 1e-6, rel=1e-3) and frozen.backward == 0


def test_memory_of_a_layer():
    """Both hyper-connections of a layer, by hand: streams of 134 MB, one of them of 34 MB, at 10^12 bytes a second."""
    found = layer_seconds(MicrobatchShape(FLASH, 4096), flat(1e30), 0)["mixers"]
    stream = 4096 * 4096 * 2
    assert found.forward == pytest.approx((2 * (4 + 1) + 2 * (1 + 8)) / 2 * 1e-12 * stream, rel=0.01)
    assert found.backward == pytest.approx((13 + 2 * 5 + 4) * 1e-12 * stream, rel=0.01)


def test_the_loss_has_its_gradients_in_the_forward_pass():
    found = head_seconds(MicrobatchShape(FLASH, 4096), flat(bytes_=1e30))
    assert found.forward == pytest.approx(3 * 2 * 4096 * 4096 * 129280 / 1e15)
    assert found.backward < 1e-12 and found.weight == 0


def test_experts_take_the_rate_of_about_as_many_rows():
    rates = {per: {name: Figure(per * 1e12, "measured", "") for name in EXPERTS} for per in (768.0, 96.0)}
    known = replace(flat(bytes_=1e30), experts=rates)
    assert known.of_experts(700)["forward"].value == 768e12
    assert known.of_experts(270)["forward"].value == 96e12  # 272 is in the middle, by proportion
    assert known.of_experts(1)["forward"].value == 96e12
    assert replace(known, experts={}).of_experts(100)["forward"].value == 1e15
    few, many = (layer_seconds(MicrobatchShape(FLASH, 4096, expert=ranks), known, 5)["moe"] for ranks in (1, 8))
    routed = 6 * 4096 * 4096 * 2048 * 6
    assert float(few.forward) - float(many.forward) == pytest.approx(routed / 96e12 - routed / 768e12)


def test_a_model_is_the_sum_of_its_terms_and_the_core():
    core = {kind: Core(Figure(1.0, "measured", ""), Figure(2.0, "measured", ""), 1e11) for kind in KINDS}
    dense = Figure(1000.0, "measured", "")
    rates = Rates("x", "H200", FLASH, 4096, dense, dense, core, flat())  # type: ignore[arg-type]
    shape = MicrobatchShape(FLASH, 4096, expert=8)
    times = model_times(shape, rates)
    terms = layer_seconds(shape, flat(), 4)
    scores = 273.745444864e9 / 1e11 * 1e-3
    assert times.blocks[4].forward == pytest.approx(sum(float(t.forward) for t in terms.values()) + scores)
    assert times.blocks[4].backward == pytest.approx(sum(float(t.backward) for t in terms.values()) + 2 * scores)
    assert times.head == head_seconds(shape, flat())
    assert times.blocks[43].forward > times.blocks[0].forward + times.head.forward
    assert times.modules[4]["moe"] == terms["moe"].forward
    assert times.modules[4]["expert_activation"] == pytest.approx(4096 * 6 * 2048 * 6 / 1e12)
    half = model_times(replace(shape, sharing=2), rates)
    assert half.blocks[0].forward == pytest.approx(float(times.blocks[0].forward) / 2)


def test_another_gpu_is_a_guess_in_everything():
    found = flat().scaled(2.0, "twice")
    assert found.rates["copy"] == Figure(2e12, "scaled", "twice; copy")
    assert found.experts[768.0]["forward"].value == 2e15
