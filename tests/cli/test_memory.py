"""Refused allocations, told from faults of the program."""

from __future__ import annotations

import pytest
import torch

from undertow import cli


@pytest.mark.parametrize(
    "exception",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    ],
)
def test_a_refused_allocation_does_not_fit(monkeypatch, capsys, exception):
    def fail(**_: object) -> None:
        raise exception

    monkeypatch.setattr(cli, "app", fail)
    assert cli.main(["fail"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory: ")
    assert said.endswith("; take a smaller model, batch or sequence\n")
    assert said.count("\n") == 1


def test_other_runtime_errors_keep_their_traceback(monkeypatch):
    def fail(**_: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        cli.main(["fail"])


def test_an_allocation_torch_refuses(monkeypatch, capsys):
    def fail(**_: object) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(cli, "app", fail)
    assert cli.main(["fail"]) == 3
    assert "allocate" in capsys.readouterr().err
