"""The hooks file: what it offers gives what the reference gives, and what no layer would choose is refused."""

import importlib.util

import pytest
import torch

from undertow.bench.attention import Form, Problem
from undertow.bench.attention_peers import _seen_rows
from undertow.bench.hooks import HOOKS, write_hooks
from undertow.bench.task import relative
from undertow.config.errors import InputError
from undertow.ops import registry
from undertow.ops.registry import REFERENCE
from undertow.ops.segments import Rows, Segments, entry_rows


@pytest.fixture
def hooks(tmp_path):
    path = tmp_path / "ours.py"
    write_hooks(path)
    spec = importlib.util.spec_from_file_location("ours", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_hook_is_there(hooks):
    assert all(callable(getattr(hooks, name)) for name in HOOKS)


@pytest.mark.parametrize("form", [Form(4, 32), Form(4, 32, ratio=128), Form(4, 32, ratio=4, keep=16)])
def test_attention_over_one_table_of_keys(hooks, form, cpu):
    problem = Problem(form, (256,), cpu)
    index = _seen_rows(problem).int()
    leaves = [x.float() for x in problem.leaves]
    q, *latents, sink = leaves
    kv, do = torch.cat(latents), problem.do.float()
    for _ in range(2):  # the second time from what is prepared
        o, lse = hooks.sparse_attn_fwd(q, kv, index, sink, problem.scale)
        dq, dkv, dsink = hooks.sparse_attn_bwd(q, kv, index, sink, problem.scale, o, lse, do)
    expected, _, gradients = problem.expected
    assert relative(o, expected) < 1e-5 and lse.shape == (256, 4)
    assert relative(dq, gradients[0]) < 1e-5 and relative(dsink, gradients[-1]) < 1e-5
    assert relative(dkv, torch.cat(gradients[1:-1])) < 1e-5


def test_gradients_are_those_of_the_scale_and_content_that_are_given(hooks, cpu):
    problem = Problem(Form(4, 32, ratio=4, keep=16), (256,), cpu)
    index = _seen_rows(problem).int()
    q, window, entries, sink = (x.detach().float() for x in problem.leaves)
    kv, do = torch.cat([window, entries]), problem.do.float()

    def check(scale):
        problem.scale = scale
        o, lse = hooks.sparse_attn_fwd(q, kv, index, sink, scale)
        dq, dkv, dsink = hooks.sparse_attn_bwd(q, kv, index, sink, scale, o, lse, do)
        leaves = [x.detach().requires_grad_() for x in (q, window, entries, sink)]
        out = problem.call(REFERENCE["sparse_attention"], leaves)[0]
        expected = torch.autograd.grad(out, leaves, do)
        found = (dq, dkv[:256], dkv[256:], dsink)
        assert max(relative(x, y) for x, y in zip(found, expected, strict=True)) < 1e-5

    check(0.177)
    check(0.5)
    q.mul_(2.0)
    check(0.5)


@pytest.mark.parametrize(
    ("row", "column", "value"), [(slice(None), slice(128), -1), (200, 0, 72), (0, 1, 1), (200, 5, 199)]
)
def test_another_window_is_refused(hooks, cpu, row, column, value):
    problem = Problem(Form(4, 32, ratio=4, keep=16), (256,), cpu)
    index = _seen_rows(problem).int()
    rest = torch.cat(problem.leaves[1:3]), index, problem.sink, problem.scale
    hooks.sparse_attn_fwd(problem.q, *rest)
    index[row, column] = value
    with pytest.raises(ValueError, match="not the causal window of 128 tokens"):
        hooks.sparse_attn_fwd(problem.q, *rest)


def test_calls_that_kernels_pass_on_are_warned_of_once(hooks, cpu, monkeypatch):
    monkeypatch.setattr(registry, "machine", lambda device: registry.Machine("cuda", "sm_90"))
    problem = Problem(Form(4, 64), (256,), cpu)
    rest = problem.window, _seen_rows(problem).int(), problem.sink, problem.scale
    with pytest.warns(UserWarning) as told:
        found = [hooks.sparse_attn_fwd(problem.q, *rest)[0] for _ in range(2)]
    assert [str(warning.message) for warning in told] == [
        "sparse_attention by reference instead of triton: the kernels take 8, 16, 32, 64 or 128 heads, not 4"
    ]
    assert torch.equal(*found)


def test_the_window_may_be_in_any_order(hooks, cpu):
    problem = Problem(Form(4, 32), (256,), cpu)
    index = _seen_rows(problem).int()
    rest = problem.sink, problem.scale
    found = [hooks.sparse_attn_fwd(problem.q, problem.window, x, *rest)[0] for x in (index, index.flip(1))]
    assert torch.equal(*found)


def test_rows_of_the_future_are_refused(hooks, cpu):
    problem = Problem(Form(4, 32, ratio=4, keep=16), (256,), cpu)
    index = _seen_rows(problem).int()
    index[0, 128] = 256 + 63
    with pytest.raises(ValueError, match="end after the query"):
        hooks.sparse_attn_fwd(problem.q, torch.cat(problem.leaves[1:3]), index, problem.sink, problem.scale)


def test_scores_and_choice(hooks, cpu):
    torch.manual_seed(0)
    q, k, w = torch.randn(32, 4, 16), torch.randn(8, 16), torch.randn(32, 4)
    segments = Segments.from_lengths([32])
    rows = Rows(k, segments.layout(entry_rows(4)))
    scores = hooks.indexer_logits(q, k, w, 4)
    assert torch.equal(scores, REFERENCE["indexer_scores"](q, rows, w, segments, 4))
    assert torch.equal(hooks.topk(scores, 3), REFERENCE["indexer_select"](q, rows, w, 3, segments, 4))


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="give --peer-hooks FILE a name"):
        write_hooks(tmp_path / "none" / "ours.py")
