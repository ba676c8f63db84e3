"""The k best of rows, against a stable sort: ties, zeros of both signs, NaN and infinities, rows of any width."""

import pytest
import torch

from undertow.ops.reference.router import stable_topk
from undertow.ops.triton.indexer import top_k
from undertow.ops.triton.indexer.top_k import choose_best


def best(scores: torch.Tensor, visible: torch.Tensor, k: int) -> list[list[int]]:
    """By the reference: the k best, in ascending order, then -1."""
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    rows = []
    for row, picks in zip(scores, stable_topk(scores, k).tolist(), strict=True):
        kept = sorted(n for n in picks if not torch.isneginf(row[n]))
        rows.append(kept + [-1] * (k - len(kept)))
    return rows


def found(scores: torch.Tensor, visible: torch.Tensor, k: int, device: str) -> list[list[int]]:
    """By the kernel, as rows 3 on of a longer call whose first entries are others."""
    low = torch.arange(len(scores) + 3, dtype=torch.int32) * 2
    high = low + torch.cat((torch.zeros(3, dtype=torch.int32), visible.to(torch.int32)))
    out = torch.full((len(low), k), -7, device=device)
    choose_best(scores.to(device), low.to(device), high.to(device), 3, out)
    assert (out[:3] == -7).all()
    return out[3:].tolist()


def drawn(rows: int, width: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(width)
    scores = torch.randn(rows, width, generator=g)
    scores[0] = (scores[0] * 2).round() / 2
    scores[1] = torch.where(scores[1] > 0, 0.0, -0.0)
    scores[2, ::3] = float("nan")
    scores[3, ::2] = -torch.inf
    scores[4, ::5] = torch.inf
    scores[5] = torch.where(scores[5] > 0.3, scores[5], 1.0)
    scores[6] = -scores[6].abs() * 1e-30
    scores[7, 1:] = -torch.nan
    return scores


@pytest.mark.parametrize(("width", "k"), [(1, 1), (7, 20), (32, 5), (61, 1), (61, 20), (61, 70)])
def test_rows(width, k, device):
    scores = drawn(9, width)
    for visible in (torch.full((9,), width), torch.arange(9) * width // 8):
        assert found(scores, visible, k, device) == best(scores, visible, k)


def adversarial(width: int) -> torch.Tensor:
    """Rows that are all equal, of two values, mostly NaN, mostly -inf, of denormals, of the whole range of float32."""
    g = torch.Generator().manual_seed(width)
    x = torch.randn(11, width, generator=g)
    x[0] = -1.5
    x[1] = torch.where(x[1] > 0, 2.0, 1.0)
    x[2] = torch.where(x[2] > -0.5, torch.nan, x[2])
    x[3] = torch.where(x[3] > -0.5, -torch.inf, x[3])
    x[4] *= 1e-43
    x[5] = torch.randint(-(1 << 31), 1 << 31, (width,), generator=g).int().view(torch.float32)
    x[6] = torch.tensor([3.4e38, -3.4e38]).repeat(width)[:width]
    x[7] = 1.0
    x[7, -1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    x[8] = torch.nan
    x[9] = -torch.inf
    x[10, : width // 2] = torch.inf
    return x


@pytest.mark.parametrize("k", [1, 16, 39])
def test_adversarial_rows(k, device):
    scores, visible = adversarial(40), torch.full((11,), 40)
    assert found(scores, visible, k, device) == best(scores, visible, k)


def test_ties_in_a_row_of_many_runs(device):
    """Of more than 1,024 columns places are counted in runs of 128."""
    scores = torch.zeros(2, 1500)
    scores[0, [3, 130, 131, 1257, 1499]] = 1.0
    scores[1, 1250:] = 1.0
    rows = found(scores, torch.tensor([1500, 1490]), 390, device)
    assert rows == [[*range(388), 1257, 1499], [*range(150), *range(1250, 1490)]]


@pytest.mark.parametrize("width", [1100, 2048])
def test_wide_rows(width, device):
    scores = drawn(9, width)
    visible = torch.tensor([width, 1030, 900, width - 1, width, 1029, 1024, width, width])
    assert found(scores, visible, 512, device) == best(scores, visible, 512)


def test_what_is_not_visible_is_never_chosen(device):
    scores = torch.full((4, 40), torch.nan)
    visible = torch.tensor([0, 3, 17, 33])
    for row, n in enumerate(visible.tolist()):
        scores[row, :n] = torch.randn(n, generator=torch.Generator().manual_seed(n))
    assert found(scores, visible, 4, device) == best(scores, visible, 4)


def test_rows_too_wide_for_the_registers(device, monkeypatch):
    """In parts of 4,096 columns, of which the last one is not full."""
    monkeypatch.setattr(top_k, "tiles", lambda *_: {"HELD": 1024, "WARP": 1024})
    scores = drawn(8, 5000)[:4]
    scores[0, 4000:4200] = 7.0
    visible = torch.tensor([5000, 3, 4097, 4095])
    assert found(scores, visible, 150, device) == best(scores, visible, 150)
