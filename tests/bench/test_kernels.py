"""The tasks of `bench kernels`: every operator has them, what stands beside our kernels is right, faults are found."""

import math
from itertools import product

import pytest
import torch

from undertow.bench import attention_peers, kernels
from undertow.bench.attention import TINY, Problem, attention_tasks
from undertow.bench.indexer import TINY as TINY_INDEXER
from undertow.bench.indexer import Indexer
from undertow.bench.kernels import OPS, PEERS, lengths_of, parse_shape, tasks
from undertow.bench.table import kernels_table
from undertow.bench.task import Absent, relative
from undertow.config.errors import InputError
from undertow.ops.registry import REFERENCE

LENGTHS = (37, 5, 22)
SHORT = ((1, 2, 3), (2,), (200,))


@pytest.mark.parametrize(("op", "lengths"), [*((op, LENGTHS) for op in OPS), *product(OPS[:-1], SHORT)])
def test_the_reference_passes_its_own_check(op, lengths, cpu):
    names = []
    for task in tasks(op, lengths, cpu, ("reference", "torch.topk")):
        names.append(task.op)
        for name in ("reference", "torch.topk"):
            if name in task.ways:
                assert task.error(task.ways[name].build()()) <= task.ways[name].limit, (task.op, name)
        if op != "quantise":
            assert task.ways.get("triton") is not None
    assert names and all(name for name in names)


@pytest.mark.parametrize("op", OPS[:-1])
def test_kernels_are_absent_from_a_cpu_with_a_reason(op, cpu):
    for task in tasks(op, (40,), cpu, PEERS):
        with pytest.raises(Absent, match="triton"):
            task.ways["triton"].build()


@pytest.mark.parametrize("name", TINY)
def test_gathered_rows_are_those_that_the_reference_sees(name, cpu, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    problem = Problem(TINY[name], LENGTHS, cpu)
    call = attention_peers.compiled(problem)()
    leaves = [x.detach().float().requires_grad_() for x in problem.leaves]
    o = call(leaves)
    gradients = torch.autograd.grad(o, leaves, problem.do.float())
    assert relative(o, problem.expected[0]) < 1e-5
    assert max(relative(x, y) for x, y in zip(gradients, problem.expected[2], strict=True)) < 1e-5


@pytest.mark.parametrize("name", ["swa", "hca"])
def test_the_block_mask_is_what_the_gather_sees(name, cpu):
    problem = Problem(TINY[name], LENGTHS, cpu)
    index = attention_peers._seen_rows(problem)
    rows = len(problem.window) + (0 if problem.entries is None else len(problem.entries))
    expected = torch.zeros(len(index), rows + 1, dtype=torch.bool)
    expected.scatter_(1, torch.where(index < 0, rows, index), True)
    visible = attention_peers._visible(problem)
    found = visible(torch.arange(len(index))[:, None], torch.arange(rows)[None])
    assert torch.equal(found, expected[:, :-1])


def test_a_wrong_log_sum_exp_is_found(cpu):
    problem = Problem(TINY["csa"], LENGTHS, cpu)
    forward = next(attention_tasks("csa", TINY["csa"], LENGTHS, cpu, ("reference",)))
    o, lse, _ = problem.expected
    assert forward.error((o, lse)) == forward.error(o) == 0.0
    assert forward.error((o, lse + 2e-3 * (torch.arange(len(lse)) == 9)[:, None])) == math.inf


def test_a_selection_is_distinct_visible_and_as_large_as_it_can_be(cpu):
    problem = Problem(TINY["csa"], LENGTHS, cpu)
    selected, seen = problem.selected, (problem.segments.positions + 1) // 4
    assert torch.equal((selected >= 0).sum(1), seen.clamp(max=8))
    assert bool((selected < seen[:, None]).all())
    assert all(len(set(row)) == len(row) for row in ([e for e in r if e >= 0] for r in selected.tolist()))


def test_the_check_of_a_choice_finds_every_fault(cpu):
    p = Indexer(TINY_INDEXER, LENGTHS, cpu)
    best = REFERENCE["indexer_select"](p.q.float(), p.rows(p.keys.float()), p.weights, p.keep, p.segments, p.ratio)
    assert p.of_choice(best) < 1e-6 and p.of_choice(best.flip(1)) < 1e-6
    long = 36  # the last token of the first document sees 9 entries and keeps 8
    for entry in (-1, int(best[long, 1]), 9):  # too few, one twice, one that is not visible
        bad = best.clone()
        bad[long, 0] = entry
        assert p.of_choice(bad) == math.inf
    worse = best.clone()
    worse[long, 0] = next(iter(set(range(9)) - set(best[long].tolist())))
    assert 0 < p.of_choice(worse) < math.inf


def test_torch_top_k_is_timed_alone_and_checked_without_hidden_entries(cpu):
    top = next(task for task in tasks("indexer", LENGTHS, cpu, ("torch.topk",)) if task.op == "top-k")
    value, entry = top.ways["torch.topk"].build()()
    assert value.shape == entry.shape == (64, 8) and bool(torch.isneginf(value[0]).all())
    assert top.error((value, entry)) < 1e-6 and top.error(entry) == math.inf


def test_work_of_choosing_counts_the_visible_scores(cpu):
    top = next(task for task in tasks("indexer", LENGTHS, cpu, ()) if task.op == "top-k")
    seen = sum((t + 1) // 4 for n in LENGTHS for t in range(n))
    assert top.work.bytes == 4 * seen + 2 * 4 * 64 + 8 * 8 * 64 and top.work.exact == top.work.nominal == 0


def test_work_of_distillation_in_both_conventions(cpu):
    forward, backward = (task.work for task in tasks("distillation", LENGTHS, cpu, ()))
    seen = sum(min((t + 1) // 4, 8) for n in LENGTHS for t in range(n))
    slots = 37 * 8 + 5 * 1 + 22 * 5
    taught, taken = 2 * 4 * 32, 2 * 4 * 16
    assert (forward.exact, forward.nominal) == (seen * (taught + taken), slots * (taught + taken))
    assert (backward.exact, backward.nominal) == (seen * (taught + 3 * taken), slots * (taught + 3 * taken))


def test_a_choice_among_no_entries_is_none(cpu):
    p = Indexer(TINY_INDEXER, (3, 1), cpu)
    none = torch.full((4, p.keep), -1)
    assert p.scores.shape == (4, 0) and p.of_choice(none) == 0.0
    none[2, 0] = 0
    assert p.of_choice(none) == math.inf


def test_shapes(cpu):
    assert parse_shape("4096") == (4096,) and parse_shape("1000+3096") == (1000, 3096)
    assert lengths_of("csa", torch.device("cuda")) == ((4096,), (8192,), (16384,))
    assert lengths_of("quantise", torch.device("cuda")) == ((65536,),)
    assert lengths_of("csa", cpu) == ((96,),)
    for text in ("", "4k", "0", "12+", "-3", "²"):
        with pytest.raises(InputError, match="write the tokens of each document"):
            parse_shape(text)
    assert parse_shape("2147483647") == (2147483647,) and parse_shape("0" * 5000 + "7") == (7,)
    for text in ("2147483648", "2147483647+1", "9" * 23, "9" * 5000):
        with pytest.raises(InputError, match="more than 2,147,483,647 tokens in all") as found:
            parse_shape(text)
        assert len(str(found.value)) < 200


def test_a_loss_that_is_nothing_but_rounding_is_no_fault(cpu):
    """Each query sees one entry at most, so that the exact loss is 0."""
    check = next(iter(tasks("distillation", (7,), cpu, ()))).error
    assert check(torch.full((7,), 1e-6)) < 3e-3 < check(torch.full((7,), 1e-4))


def test_what_has_no_room_is_told_and_the_rest_goes_on(cpu, monkeypatch):
    made, seen = kernels.tasks, []

    def tasks(op, *rest):
        if op == "hca":
            raise RuntimeError("CUDA out of\nmemory")
        yield from made(op, *rest)

    monkeypatch.setattr(kernels, "tasks", tasks)
    result = kernels.bench_kernels(
        ["hca", "quantise"], [(8,)], (), cpu, save=lambda result: seen.append(len(result["rows"]))
    )
    assert result["failures"] == [{"op": "hca", "shape": "8 tokens", "reason": "RuntimeError: CUDA out of memory"}]
    assert seen == [0, 6] and {row["status"] for row in result["rows"]} == {"ok"}
    assert "FAILED: hca, 8 tokens: RuntimeError: CUDA out of memory" in kernels_table(result)


def test_deterministic_runs_leave_the_setting_as_it_was(cpu, monkeypatch):
    seen = []
    monkeypatch.setattr(
        kernels, "tasks", lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()) or iter(())
    )
    for wanted in (True, False):
        assert kernels.bench_kernels(["swa"], [(8,)], (), cpu, deterministic=wanted)["deterministic"] is wanted
    assert seen == [True, False] and not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
