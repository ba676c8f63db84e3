"""Tasks of one operator: what is wrong is found, results and gradients apart, and only those that are asked for."""

import math
from dataclasses import replace

import pytest
import torch

from undertow.bench import experts, fusions, kernels, loss
from undertow.bench.ceilings import Ceilings
from undertow.bench.kernels import tasks
from undertow.bench.operation import LAUNCHES, Operation, moved, normal
from undertow.bench.table import kernels_table
from undertow.bench.task import EXACT, OWN, PEER, Absent, run_task
from undertow.bench.work import Work
from undertow.config.presets import preset
from undertow.model.compressor import Compressor
from undertow.ops.reference.experts import Dispatch
from undertow.ops.registry import REFERENCE
from undertow.ops.segments import Rows, Segments

LENGTHS = (37, 5, 22)
TOKENS = sum(LENGTHS)
TINY = fusions.TINY


def found(op, cpu, peers=("reference",), lengths=LENGTHS):
    return {task.op: task for task in tasks(op, lengths, cpu, peers)}


@pytest.mark.parametrize("op", ["norm", "permute", "loss", "optimizer"])
def test_what_torch_has_itself_is_right(op, cpu):
    timed = [task for task in found(op, cpu, ("torch",)).values() if "torch" in task.ways]
    assert timed and all(task.error(task.ways["torch"].build()()) <= PEER for task in timed)


def test_grouped_products_of_torch_are_of_a_gpu(cpu):
    for task in found("experts", cpu, ("torch",)).values():
        with pytest.raises(Absent, match="on a GPU"):
            task.ways["torch"].build()()


def operation(cpu, **types):
    x = normal(9, 8, device=cpu, seed=1)
    weight = normal(8, device=cpu, seed=2, like=types.get("weight", torch.bfloat16))
    call = lambda op, leaves: (op(*leaves, 1e-6),)  # noqa: E731
    return Operation("rms_norm", "9 x 8", (x, weight), call, ("reference", "half"), {
        "half": lambda leaves: (REFERENCE["rms_norm"](leaves[0], 0.5 * leaves[1], 1e-6),),
        "not asked for": lambda leaves: (leaves[0],),
    })  # fmt: skip


def test_a_wrong_result_and_a_wrong_gradient_are_found(cpu):
    o = operation(cpu)
    forward, backward = o.forward("forward", Work(0)), o.backward("backward", Work(0))
    for task in (forward, backward):
        assert set(task.ways) == {"triton", "reference", "half"}
        assert task.error(task.ways["half"].build()()) == pytest.approx(0.5, rel=0.02)
        assert task.error(task.ways["reference"].build()()) < OWN
    result = o.expected[0]
    assert forward.error(result) == 0.0 and forward.error((result[0] * math.nan,)) != 0.0
    assert backward.error(o.expected[1]) == 0.0


def test_gradients_of_some_leaves_alone(cpu):
    o = operation(cpu)
    task = o.backward("gradient of the weight", Work(0), of=(1,))
    (gradient,) = task.ways["reference"].build()()
    assert gradient.shape == (8,) and task.error([gradient]) < OWN
    # The gradient of the rows is right where the weight is, so that half of it is found in that alone.
    assert task.error(task.ways["half"].build()()) == pytest.approx(0.5, rel=0.02)


def test_operators_of_float32_have_the_narrower_limit(cpu):
    assert operation(cpu).limit == operation(cpu, weight=torch.float32).limit == OWN
    limits = {task.ways["triton"].limit for op in ("pool", "router") for task in found(op, cpu).values()}
    assert limits == {EXACT, OWN}
    assert found("pool", cpu)["pool csa forward"].ways["triton"].limit == EXACT


def test_gradients_come_in_as_the_results_are(cpu):
    o = operation(cpu)
    (push,) = o.pushes
    assert (push.shape, push.dtype) == ((9, 8), torch.bfloat16)


@pytest.mark.parametrize(("name", "overlap"), [("csa", True), ("hca", False), ("indexer", True)])
def test_windows_are_those_of_the_model(name, overlap, cpu):
    seen = []

    class Seen:
        linear = staticmethod(lambda x, w: x @ w.T)
        rms_norm = staticmethod(REFERENCE["rms_norm"])
        rotary = staticmethod(REFERENCE["rotary"])

        def compress_pool(self, u, v, ape, slots, state=None):
            seen.append(slots)
            return REFERENCE["compress_pool"](u, v, ape, slots)

    class Cache:
        append = staticmethod(lambda name, data, layout: Rows(data, layout))
        load = staticmethod(lambda name: None)
        store = staticmethod(lambda name, make: None)

    segments, ratio = Segments.from_lengths(LENGTHS), TINY.ratios[name == "hca"]
    model = Compressor(preset("v4-debug"), ratio, 8, overlap, Seen())
    u = torch.randn(TOKENS, 16 if overlap else 8)
    pool = model._overlapping if overlap else model._plain
    pool(u, u, segments, Cache(), "c")
    complete = segments.groups(ratio)[2]
    assert torch.equal(seen[0][complete], fusions._windows(segments, ratio, overlap))


def test_the_choice_of_experts_is_judged_by_its_scores(cpu):
    task = found("router", cpu)["router forward"]
    chosen, weights, scores = task.ways["reference"].build()()
    assert task.error((chosen, weights, scores)) < EXACT
    assert task.error((chosen.flip(1), weights.flip(1), scores)) < EXACT
    assert task.error((chosen.flip(1), weights, scores)) > 1e-2
    twice, outside = chosen.clone(), chosen.clone()
    twice[3] = chosen[3, 0]
    outside[3, 0] = 8
    assert task.error((twice, weights, scores)) == task.error((outside, weights, scores)) == math.inf
    worse = chosen.clone()
    worse[3, 0] = next(e for e in range(8) if e not in chosen[3].tolist())
    assert task.error((worse, weights, scores)) > EXACT


def test_another_order_is_found(cpu):
    task = found("router", cpu)["order"]
    order = task.ways["reference"].build()()
    assert task.error(order) == 0.0
    assert task.error(Dispatch(order.choice.int(), order.slot.int(), order.counts, order.k)) == 0.0
    assert task.error(replace(order, slot=order.slot.flip(0))) == math.inf
    both = found("router", cpu)["router and order"]
    chosen, order = both.ways["reference"].build()()
    assert both.error((chosen, order)) == 0.0
    assert both.error((chosen.flip(0), order)) == math.inf


def test_bytes_of_small_operators(cpu):
    x, w, turn = TOKENS * 32 * 2, 32 * 2, 2 * TOKENS * 4 * 4
    norm, rotary = found("norm", cpu), found("rotary", cpu)
    assert norm["norm forward"].work.bytes == 2 * x + w and norm["norm backward"].work.bytes == 3 * x + 2 * w
    q = TOKENS * 2 * 16 * 2
    assert norm["norm of heads backward"].work.bytes == 3 * q
    assert norm["norm of heads and rotary forward"].work.bytes == 2 * q + turn
    assert rotary["rotary forward"].work.bytes == rotary["rotary backward"].work.bytes == 2 * q + turn
    swiglu, rows = found("swiglu", cpu), 2 * TOKENS
    assert swiglu["swiglu forward"].work.bytes == rows * (3 * 16 * 2 + 4)
    assert swiglu["swiglu backward"].work.bytes == rows * (5 * 16 * 2 + 2 * 4)
    permute, order = found("permute", cpu), 8 * rows
    assert permute["permute forward"].work.bytes == permute["permute backward"].work.bytes == 3 * x + order
    assert permute["unpermute forward"].work.bytes == 4 * x + order


def test_streams_that_are_passed_on_are_not_moved(cpu):
    hyper, streams, x = found("hyper", cpu), TOKENS * 4 * 32 * 2, TOKENS * 32 * 2
    mixed, weights = 4 * TOKENS * (4 + 16), 4 * (24 * 128 + 3 + 24) + 2 * 32
    assert hyper["hyper in forward"].work.bytes == streams + weights + x + mixed
    assert hyper["hyper in backward"].work.bytes == 3 * streams + 2 * weights + x + mixed
    assert hyper["hyper out forward"].work.bytes == 2 * streams + x + mixed
    assert hyper["hyper out backward"].work.bytes == 3 * streams + 2 * (x + mixed)


def test_operations_of_experts_and_loss(cpu):
    rows, each = 2 * TOKENS, {"fc1": 32 * 32, "fc2": 16 * 32}
    for task in tasks("experts", LENGTHS, cpu, ()):
        assert task.work.exact == task.work.nominal == 2 * rows * each[task.op[:3]]
    experts_of = [task for task in tasks("experts", LENGTHS, cpu, ()) if task.op == "fc1 gradient of weights"]
    assert [t.work.bytes for t in experts_of] == [2 * rows * (32 + 32) + 2 * e * each["fc1"] for e in (4, 8)]
    mean = found("loss", cpu)
    assert mean["loss with gradients"].work.exact == 3 * mean["loss forward"].work.exact == 6 * TOKENS * 32 * 200


def test_torch_takes_the_loss_by_chunks(cpu, monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK", 10)
    task = found("loss", cpu, ("torch",))["loss with gradients"]
    assert task.error(task.ways["torch"].build()()) <= PEER


def test_experts_have_different_numbers_of_rows(cpu):
    counts = experts._order(TOKENS, 2, 8, cpu).counts
    assert int(counts.sum()) == 2 * TOKENS and len(set(counts.tolist())) > 3


def test_an_activation_without_bounds_is_found(cpu):
    forward, backward = tasks("swiglu", LENGTHS, cpu, ("reference",))
    assert forward.error(forward.ways["reference"].build()()) < OWN
    both = TINY.limit / 2 * normal(2 * TOKENS, 32, device=cpu, seed=1)
    weight = normal(2 * TOKENS, device=cpu, seed=2, like=torch.float32).sigmoid()
    leaves = [x.float().requires_grad_() for x in (both, weight)]
    unbounded = REFERENCE["swiglu"](leaves[0], None, 1e9, leaves[1])
    push = normal(*unbounded.shape, device=cpu, seed=100)
    assert forward.error((unbounded.detach(),)) > PEER
    assert backward.error(torch.autograd.grad(unbounded, leaves, push.float())) > PEER


def test_small_operators_are_many_in_a_graph_and_it_is_said(cpu):
    many = {"pool": LAUNCHES, "router": LAUNCHES, "norm": 1, "swiglu": 1, "experts": 1, "loss": 1}
    assert all({task.calls for task in found(op, cpu).values()} == {n} for op, n in many.items())
    task = found("router", cpu)["order"]
    (row,) = [r for r in run_task(task, Ceilings(1e9, 1e9, 0, 0), cpu) if r["way"] == "reference"]
    row["ms"]["how"] = "graph of 20 calls"
    result = kernels._empty(cpu, Ceilings(1e9, 1e9, 0, 0), False) | {"rows": [row]}
    assert "graph of 20 calls" in kernels_table(result)


def test_bytes_of_tensors():
    assert moved(torch.zeros(3), torch.zeros(2, dtype=torch.int64)) == 28
