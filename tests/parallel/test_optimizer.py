"""Steps of the optimizers on weights that lie on many ranks, against one process."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import torch.distributed as dist

from tests.model.small import stirred
from tests.optim import plain
from tests.parallel.test_shard import CONFIG, ROWS, all_rows, backward, joined, of_all_ranks
from undertow.config.parallel import ParallelConfig
from undertow.model.indexer import of_indexer
from undertow.optim.build import build_optimizer
from undertow.optim.clipping import clip_gradients, first_not_finite
from undertow.parallel.experts import expert_parameters
from undertow.parallel.held import held
from undertow.parallel.mesh import build_mesh
from undertow.parallel.norm import gradient_norm
from undertow.parallel.shard import share_out, sum_gradients

SLOW = pytest.mark.slow
STEPS = 5
ALL = (0, 1, 2, 3, 4)
RATE = 1e-3
# The first layer reads copies of one stream. How it mixes them has no effect and a gradient of rounding errors alone,
# which both optimizers make as large as any other.
IDLE = "layers.0.hc_attn."
EPSILON = 1e-8  # a single number may have such a gradient too, and AdamW's smaller addend would leave it its sign


def learn(model, settings, batches, whole, mesh=None, recompute=()):
    """Losses of a few clipped steps, and the last gradient norms, the indexer's apart."""
    optimizer = build_optimizer(model, settings, mesh)
    losses, norms = [], []
    for _ in range(STEPS):
        found = backward(model, batches, whole, recompute)
        if mesh is not None:
            found = of_all_ranks(found, mesh)
            sum_gradients(model, mesh)
        losses.append(found["total"])
        norms = []
        for apart in (False, True):
            members = [p for name, p in model.named_parameters() if of_indexer(name) is apart]
            norm = None if mesh is None else gradient_norm(model, mesh, members)
            norms.append(float(clip_gradients(members, 0.5, norm)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, optimizer


@lru_cache(maxsize=4)
def one_process(algorithm, rows, config):
    model = stirred(config)
    settings = plain.Settings(algorithm, learning_rate=RATE, epsilon=EPSILON)
    losses, norms, _ = learn(model, settings, *all_rows(rows))
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def compare(parallel, shard, algorithm, recompute=(), config=CONFIG, rows=ROWS):
    """Losses and last norms here, and how many parameters this rank holds no row of; on rank 0 also the farthest loss
    or norm, and the distance of all parameters together and of the farthest, as shares of one process'."""
    batches, whole = all_rows(rows)
    mesh = build_mesh(ParallelConfig(**parallel), shard, config)
    model = stirred(config)
    share_out(model, mesh)
    place, parts = mesh.data_place
    settings = plain.Settings(algorithm, learning_rate=RATE, epsilon=EPSILON)
    losses, norms, optimizer = learn(model, settings, batches[place::parts], whole, mesh, recompute)
    experts = set(expert_parameters(model))
    ours = {name: joined(p.detach(), p in experts, mesh) for name, p in model.named_parameters()}
    empty = sum(any(not tensor.numel() for tensor in state.values()) for state in optimizer.state.values())
    if dist.get_rank():
        return losses + norms, empty
    expected, bounds, theirs = one_process(algorithm, rows, config)
    names = [name for name in theirs if not name.startswith(IDLE)]
    far = torch.stack([(ours[name] - theirs[name]).double().norm() for name in names])
    norm = torch.stack([theirs[name].double().norm() for name in names])
    off = max(abs(a / b - 1) for a, b in zip(losses + norms, expected + bounds, strict=True))
    assert expected[-1] < expected[0]
    return losses + norms, empty, off, float(far.norm() / norm.norm()), float((far / norm).max())


TWO = {"DP2": ({}, 1), "FSDP2": ({}, 2), "EP2": ({"expert": 2}, 1)}
FOUR = {"EP2xFSDP2": ({"expert": 2}, 4), "HSDP2x2": ({}, 2)}


def cases(layouts, quick):
    found = []
    for name, layout in layouts.items():
        for algorithm in ("adamw", "muon"):
            for recompute in ((), ALL):
                label = f"{name}-{algorithm}{'-recomputed' if recompute else ''}"
                marks = () if label in quick else SLOW
                found.append(pytest.param(*layout, algorithm, recompute, id=label, marks=marks))
    return found


def check(answers):
    told, _, off, far, worst = answers[0]
    assert (off <= 1e-5, far <= 1e-5, worst <= 2e-4) == (True,) * 3, (off, far, worst)
    assert all(other == told for other, *_ in answers)


@pytest.mark.parametrize(
    ("parallel", "shard", "algorithm", "recompute"),
    cases(TWO, ("FSDP2-muon-recomputed", "DP2-adamw")),
)
def test_two_ranks_learn_what_one_process_learns(two, parallel, shard, algorithm, recompute):
    check(two.run(compare, parallel, shard, algorithm, recompute))


@pytest.mark.parametrize(
    ("parallel", "shard", "algorithm", "recompute"), cases(FOUR, ("EP2xFSDP2-muon-recomputed", "HSDP2x2-adamw"))
)
def test_four_ranks_learn_what_one_process_learns(four, parallel, shard, algorithm, recompute):
    check(four.run(compare, parallel, shard, algorithm, recompute))


@pytest.mark.parametrize(("parallel", "algorithm"), [({}, "muon"), pytest.param({"expert": 2}, "adamw", marks=SLOW)])
def test_experts_that_ranks_do_not_share_evenly(four, parallel, algorithm):
    """Six experts: 2, 2, 2 and none, or of two slices of three 2 and 1 each."""
    config = CONFIG.model_copy(update={"n_routed_experts": 6})
    answers = four.run(compare, parallel, 4, algorithm, config=config)
    check(answers)
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    none = layers if parallel else 3 * layers  # the last rank has no row of six of a router either
    assert [empty for _, empty, *_ in answers] == [0, 0, 0, none]


EXPERTS = "layers.3.ffn.experts"


def not_finite(where):
    """What each rank says of a model that a few of them hold bad numbers of."""
    mesh = build_mesh(ParallelConfig(expert=2), 4, CONFIG)
    model = stirred(CONFIG)
    share_out(model, mesh)
    for rank, name, of in where:
        parameter = model.get_parameter(name)
        if of == "gradient":
            parameter.grad = torch.zeros_like(parameter)
        if rank == dist.get_rank():
            held(parameter if of == "value" else parameter.grad).detach().view(-1)[-1:] = torch.nan
    return first_not_finite(model, mesh)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ((), None),
        (((1, f"{EXPERTS}.w13", "gradient"), (3, "embed.weight", "gradient")), "embed.weight (its gradient)"),
        (((0, "embed.weight", "gradient"), (2, f"{EXPERTS}.w2", "value")), f"{EXPERTS}.w2 (its value)"),
    ],
)
def test_all_ranks_name_the_same_parameter(four, where, told):
    assert four.run(not_finite, where) == [told] * 4


def clipped(largest):
    """Norm of both groups before and after clipping, and the norm of an infinite gradient with a number of it."""
    batches, whole = all_rows(ROWS)
    mesh = build_mesh(ParallelConfig(expert=2), 4, CONFIG)
    model = stirred(CONFIG)
    share_out(model, mesh)
    backward(model, batches[dist.get_rank() :: 4], whole)
    sum_gradients(model, mesh)
    found = []
    for apart in (False, True):
        members = [p for name, p in model.named_parameters() if of_indexer(name) is apart]
        before = clip_gradients(members, largest, gradient_norm(model, mesh, members))
        found.append((float(before), float(gradient_norm(model, mesh, members))))
    bias = model.layers[0].hc_attn.base
    bias.grad.fill_(torch.inf)
    head, value = held(model.head.weight.grad), float(held(model.head.weight.grad)[0, 0])
    infinite = clip_gradients(model.parameters(), largest, gradient_norm(model, mesh))
    return found, float(infinite), float(head[0, 0]) == value


def test_gradients_on_ranks_are_clipped_by_their_global_norm(four):
    for found, infinite, same in four.run(clipped, 1e-3):
        for before, after in found:
            assert before > 1e-3 and after == pytest.approx(1e-3, rel=1e-5)
        assert infinite == float("inf") and same
