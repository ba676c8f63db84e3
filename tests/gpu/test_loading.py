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


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
@torch.no_grad()
def test_a_packed_release_is_multiplied_by_kernels(experts, dialect, tmp_path: Path) -> None:
    release, config = tmp_path / "release", tiny(hidden_size=256, moe_intermediate_size=128)
    write_release(release, config, release_tensors(config, experts=experts, dialect=dialect))
    model = undertow.load_model(release, torch.bfloat16, "cuda", packed=True)
    logits = model(torch.arange(40, device="cuda").view(2, 20))
    assert bool(logits.isfinite().all())
    taken = model.ops.calls.taken
    assert taken["linear_quantised"]["triton"] and taken["grouped_linear_quantised"].keys() == {"triton"}
    weight = model.get_submodule("layers.1.ffn.experts").w13
    x = torch.randn(30, 256, device="cuda").bfloat16()
    counts = torch.full((config.n_routed_experts,), 0, device="cuda")
    counts[1], counts[3] = 20, 10
    got = model.ops.grouped_linear_quantised(x, weight, counts).double()
    numbers = weight.dequantise().double()
    want = torch.cat([x[:20].double() @ numbers[1].t(), x[20:].double() @ numbers[3].t()])
    assert (got - want).norm() <= 3e-3 * want.norm()
