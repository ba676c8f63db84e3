"""Linear cross-entropy in Triton against the reference in float64 on the same bfloat16 operands, buffers poisoned."""

import pytest
import torch

from tests.ops.compare import Draw, relative
from undertow.ops.reference.cross_entropy import IGNORE
from undertow.ops.reference.cross_entropy import linear_cross_entropy as reference
from undertow.ops.triton.cross_entropy import linear
from undertow.ops.triton.cross_entropy.linear import linear_cross_entropy, linear_cross_entropy_mean, refusal

NARROW, WIDE = 3e-3, 1e-5


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""

    def empty(size, *, dtype, device):
        return torch.full(size, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(linear.torch, "empty", empty)


@pytest.fixture
def small(monkeypatch):
    """Three chunks of gradients, the last one partial, each of two of logits, and rows of several tiles."""
    given = {
        "rows": {"DEEP": 2, "LANES": 64, "STAGES": 1, "num_warps": 1},
        "scale": {"PROGRAMS": 3, "BLOCK": 64, "num_warps": 1},
        "chunk": {"LOGITS": 4, "GRADIENTS": 8},
    }
    monkeypatch.setattr(linear, "tiles", lambda _, kernel: dict(given[kernel]))


def operands(rows: int, width: int, vocabulary: int, device: str, ignored: int = 3, scale: float = 1.0):
    draw = Draw(rows, width, vocabulary)
    labels = draw.integers(vocabulary, rows)
    labels[draw.order(rows)[:ignored]] = IGNORE
    leaves = draw.normal(rows, width, scale=scale, dtype=torch.bfloat16), draw.normal(vocabulary, width).bfloat16()
    return [x.to(device) for x in leaves], labels.to(device)


def outcome(op, leaves, labels, grads, **options):
    mine = [x.detach().clone().requires_grad_() for x in leaves]
    loss, normaliser = op(*mine, labels, **options)
    assert not normaliser.requires_grad
    return loss, normaliser, *torch.autograd.grad(loss, mine, grads.to(loss.dtype))


def check_rows(leaves, labels, z_loss: float):
    grads = Draw("upstream").normal(len(labels)).to(labels.device)
    got = outcome(linear_cross_entropy, leaves, labels, grads, z_loss=z_loss)
    want = outcome(reference, [x.double() for x in leaves], labels, grads, z_loss=z_loss)
    for g, w, kind, bound in zip(got, want, (torch.float32,) * 2 + (torch.bfloat16,) * 2, (WIDE,) * 2 + (NARROW,) * 2,
                                 strict=True):  # fmt: skip
        assert g.dtype == kind and relative(g, w) <= bound
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(linear_cross_entropy(*leaves, labels, z_loss), got, strict=False))


def check_mean(leaves, labels, z_loss: float, upstream: float = 1.0, grad: float = 1.0):
    count = max(len(labels), 1) + 3

    def mean(hidden, weight, labels):
        losses, normaliser = reference(hidden, weight, labels, z_loss)
        return losses.sum() / count, normaliser

    grads = torch.tensor(grad, device=labels.device)
    options = {"count": count, "z_loss": z_loss, "upstream": upstream}
    got = outcome(linear_cross_entropy_mean, leaves, labels, grads, **options)
    want = outcome(mean, [x.double() for x in leaves], labels, grads)
    assert got[0].dtype == got[1].dtype == torch.float32 and got[0].shape == ()
    assert relative(got[0], want[0]) <= WIDE and relative(got[1], want[1]) <= WIDE
    for g, w in zip(got[2:], want[2:], strict=True):
        assert g.dtype == torch.bfloat16 and relative(g, w) <= NARROW
    again = outcome(linear_cross_entropy_mean, leaves, labels, grads, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    with torch.no_grad():
        assert all(
            torch.equal(a, b) for a, b in zip(linear_cross_entropy_mean(*leaves, labels, **options), got, strict=False)
        )


SHAPES = pytest.mark.parametrize(("rows", "width", "vocabulary"), [(1, 40, 90), (18, 24, 333), (8, 16, 128)])


@SHAPES
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_rows(rows, width, vocabulary, z_loss, small, device):
    check_rows(*operands(rows, width, vocabulary, device, ignored=rows // 4), z_loss)


@SHAPES
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_mean(rows, width, vocabulary, z_loss, small, device):
    check_mean(*operands(rows, width, vocabulary, device, ignored=rows // 4), z_loss)


def test_a_vocabulary_of_one(small, device):
    leaves, labels = operands(5, 3, 1, device)
    check_rows(leaves, labels, 0.0)
    check_mean(leaves, labels, 0.0)


@pytest.mark.parametrize(("rows", "scale"), [(13, 1.0), (13, 8.0), (18, 1.0)])
def test_chunks(rows, scale, small, device):
    """Two chunks round the weight's gradient twice, more are summed in float32; confident rows have small gradients."""
    check_mean(*operands(rows, 16, 100, device, scale=scale), 1e-3)


def test_as_shipped(device):
    check_rows(*operands(3, 16, 9000, device, ignored=1), 1e-4)
    check_mean(*operands(3, 16, 9000, device, ignored=1), 1e-4)


@pytest.mark.parametrize(("upstream", "grad"), [(0.3, 0.3), (1.0, -2.0), (0.25, 8.0)])
def test_upstream_gradients(upstream, grad, small, device):
    """The expected one costs nothing more, any other is right too."""
    check_mean(*operands(9, 16, 70, device), 1e-3, upstream, grad)


@pytest.mark.parametrize("op", ["rows", "mean"])
def test_ignored_labels(op, small, device):
    """Rows whose logits overflow, with ignored labels: nothing of them shows."""
    leaves, labels = operands(9, 16, 70, device, ignored=9)
    leaves[0][3] = 1e30
    found = (
        outcome(linear_cross_entropy, leaves, labels, torch.ones(9, device=device))
        if op == "rows"
        else outcome(linear_cross_entropy_mean, leaves, labels, torch.tensor(1.0, device=device), count=1)
    )
    assert all((x == 0).all() for x in found)


def test_large_logits(small, device):
    leaves, labels = operands(9, 16, 70, device, scale=1e3)
    got = outcome(linear_cross_entropy, leaves, labels, torch.ones(9, device=device), z_loss=1e-4)
    want = reference(*(x.double() for x in leaves), labels, 1e-4)
    assert relative(got[0], want[0]) < 1e-5 and all(g.isfinite().all() for g in got)


@pytest.mark.parametrize("label", [70, -1, 1 << 40])
def test_a_label_outside_the_vocabulary_gives_nan(label, small, device):
    leaves, labels = operands(9, 16, 70, device)
    labels[5] = label
    loss, _ = linear_cross_entropy(*leaves, labels)
    assert loss.isnan().nonzero().flatten().tolist() == [5]


def test_no_rows(device):
    leaves, labels = operands(0, 4, 9, device, ignored=0)
    for found in (
        outcome(linear_cross_entropy, leaves, labels, torch.ones(0, device=device)),
        outcome(linear_cross_entropy_mean, leaves, labels, torch.tensor(1.0, device=device), count=1),
    ):
        assert found[1].shape == (0,) and found[2].shape == (0, 4)
        assert found[3].shape == (9, 4) and (found[3] == 0).all()


@pytest.mark.parametrize("learns", [0, 1])
def test_one_operand_learns(learns, small, device):
    leaves, labels = operands(9, 16, 70, device)
    both = outcome(linear_cross_entropy_mean, leaves, labels, torch.tensor(1.0, device=device), count=7)
    leaves[learns].requires_grad_()
    linear_cross_entropy_mean(*leaves, labels, 7)[0].backward()
    assert leaves[1 - learns].grad is None and torch.equal(leaves[learns].grad, both[2 + learns])


def test_gradients_are_handed_over_once(small, device):
    leaves, labels = operands(9, 16, 70, device)
    loss, _ = linear_cross_entropy_mean(leaves[0], leaves[1].requires_grad_(), labels, 7)
    kept = loss.grad_fn.saved_tensors[1].data_ptr()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    leaves[1].grad = None
    loss, _ = linear_cross_entropy_mean(*leaves, labels, 7)
    kept = loss.grad_fn.saved_tensors[1].data_ptr()
    loss.backward()
    assert leaves[1].grad.data_ptr() == kept


def test_strided_operands(small, device):
    leaves, labels = operands(9, 16, 70, device)
    turned = [x.t().contiguous().t() for x in leaves]
    for a, b in zip(linear_cross_entropy(*leaves, labels), linear_cross_entropy(*turned, labels), strict=True):
        assert torch.equal(a, b)


def test_refusals():
    (hidden, weight), labels = operands(4, 3, 5, "cpu")

    def reason(hidden=hidden, labels=labels, **rest) -> str:
        return refusal(hidden, weight, labels, **rest) or ""

    assert reason() == ""
    assert "hidden states of this call in float32" in reason(hidden=hidden.float())
    assert "labels are int32" in reason(labels=labels.int())
    assert "upstream one of 0" in reason(upstream=0.0)
    assert reason(invariant=True) == ""
