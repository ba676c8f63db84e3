"""What is read without having been written shows, and few parts of sums, since the interpreter is slow."""

import pytest
import torch

from undertow.ops.triton.hyper import tiles


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    made = torch.empty

    def empty(*shape, **options):
        x = made(*shape, **options)
        return x.fill_(float("nan") if x.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture(autouse=True)
def few(device, monkeypatch):
    if device != "cpu":
        return
    changes = {
        "read": {"PROGRAMS": 4, "SLAB": 64},
        "slopes": {"PROGRAMS": 3},
        "spread": {"PROGRAMS": 4, "TOGETHER": 2, "M": 16},
    }
    for kernel, change in changes.items():
        monkeypatch.setitem(tiles.DEFAULT, kernel, {**tiles.DEFAULT[kernel], **change})


@pytest.fixture
def backwards(device, monkeypatch):
    """Makes the programs of every launch run in the opposite order from then on; on a GPU they run in any order."""

    def turn():
        if device != "cpu":
            return
        from triton.runtime.interpreter import interpreter_builder as builder

        place = builder.set_grid_idx
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda *at: place(*(n - 1 - i for n, i in zip(builder.grid_dim, at, strict=True)))
        )

    return turn
