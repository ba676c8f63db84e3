"""What is read without having been written shows: new memory holds NaN, or a number out of every range."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    made = torch.empty

    def empty(*shape, **options):
        x = made(*shape, **options)
        return x.fill_(float("nan") if x.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch, "empty", empty)
