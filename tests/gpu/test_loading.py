"""A quantised release loaded onto a GPU, by its kernels, has the numbers that the CPU reads."""

from pathlib import Path

import pytest
import torch

import undertow
from tests.checkpoint.release import release_tensors, tiny, write_release

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_release_loads_as_on_the_cpu(experts, dialect, dtype, tmp_path: Path) -> None:
    release = tmp_path / "release"
    write_release(release, tiny(), release_tensors(tiny(), experts=experts, dialect=dialect))
    here = undertow.load_model(release, dtype=dtype).state_dict()
    there = undertow.load_model(release, dtype=dtype, device="cuda").state_dict()
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        assert tensor.device.type == "cuda" and torch.equal(tensor.cpu(), here[name]), name
