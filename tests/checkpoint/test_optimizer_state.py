"""A damaged optimizer file is refused whole, with everything that is wrong with it, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.small import small_config
from undertow.checkpoint.training import Progress, load_checkpoint, save_checkpoint
from undertow.config.errors import InputError
from undertow.model.build import build_model


def begin(steps: int):
    model = build_model(small_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = None if name == "norm.weight" else torch.full_like(parameter, 0.5)
        optimizer.step()
    return model, optimizer


def damaged(folder: Path, edit: Callable[[dict], object]) -> Path:
    path = save_checkpoint(folder, *begin(1), Progress(1, 1, {}))
    tensors = load_file(path / "optimizer.safetensors")
    edit(tensors)
    save_file(tensors, path / "optimizer.safetensors")
    return path


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("head.weight/exp_avg", torch.tensor(0.0), r"misshapen \(head.weight/exp_avg is \[\], \[\d+, \d+\] is exp"),
        ("head.weight/step", torch.ones(2), r"misshapen \(head.weight/step is \[2\], \[\] is expected"),
        ("head.weight/exp_avg", "integers", r"wrong type \(head.weight/exp_avg is int64, float32 is expected"),
        ("head.weight/exp_avg", "nan", r"1 not finite \(head.weight/exp_avg\)"),
        ("head.weight/exp_avg", None, r"1 missing \(head.weight/exp_avg\)"),
        ("head.weight/step", None, r"1 missing \(head.weight/step\)"),
        ("head.weight/unknown", torch.ones(1), r"1 surplus \(head.weight/unknown\)"),
        ("norm.weight/step", torch.tensor(1.0), r"1 surplus \(norm.weight/step\)"),
        ("nobody/step", torch.tensor(1.0), r"1 surplus \(nobody/step\)"),
        ("random/cpu", None, r"1 missing \(random/cpu\)"),
        ("random/cpu", torch.ones(3, dtype=torch.uint8), r"no state of a random generator \(random/cpu \[3\]\)"),
        ("random/tpu", torch.ones(3), r"1 surplus \(random/tpu\)"),
    ],
)
def test_one_fault(tmp_path, key, value, said):
    def edit(tensors: dict) -> None:
        if value is None:
            del tensors[key]
        elif isinstance(value, torch.Tensor):
            tensors[key] = value
        else:
            tensors[key] = tensors[key].long() if value == "integers" else tensors[key] * float("nan")

    model, optimizer = begin(0)
    drawn = torch.get_rng_state()
    with pytest.raises(InputError, match=rf"optimizer.safetensors: damaged: .*{said}.*; resume from an earlier"):
        load_checkpoint(damaged(tmp_path, edit), model, optimizer)
    assert not any(optimizer.state.values()) and torch.equal(torch.get_rng_state(), drawn)


def test_all_faults_at_once(tmp_path):
    def edit(tensors: dict) -> None:
        del tensors["random/cpu"], tensors["embed.weight/step"]
        tensors["head.weight/exp_avg_sq"].fill_(float("inf"))
        tensors["head.weight/step"] = torch.ones(1)

    with pytest.raises(
        InputError,
        match=r"damaged: 2 missing \(embed.weight/step, random/cpu\); 1 not finite \(head.weight/exp_avg_sq\); "
        r"1 misshapen \(head.weight/step is \[1\], \[\] is expected\); resume",
    ) as raised:
        load_checkpoint(damaged(tmp_path, edit), *begin(0))
    assert "\n" not in str(raised.value)


def test_moments_that_are_all_lost_are_noticed(tmp_path):
    def edit(tensors: dict) -> None:
        for key in [key for key in tensors if "exp_avg" in key or key.endswith("/step")]:
            del tensors[key]

    with pytest.raises(InputError, match=r"damaged: \d+ missing \(embed.weight/exp_avg, embed.weight/exp_avg_sq, "):
        load_checkpoint(damaged(tmp_path, edit), *begin(0))
