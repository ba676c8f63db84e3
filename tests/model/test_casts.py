"""What stays float32: rotary tables under any cast, and the islands of a model built in a narrower type."""

from __future__ import annotations

import pytest
import torch

from tests.model.small import LENGTH, small_config, stirred, tokens
from undertow.model.build import build_model
from undertow.model.rotary import frequencies, table
from undertow.ops.registry import REFERENCE

ISLANDS = (".fn", ".base", ".scale", ".attn_sink", ".ape", ".gate.bias")


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
@torch.no_grad()
def test_rotary_tables_stay_float32(cast, monkeypatch):
    seen = []
    real = REFERENCE["rotary"]

    def watch(x, cos, sin, **keywords):
        seen.append((cos.dtype, sin.dtype, cos))
        return real(x, cos, sin, **keywords)

    monkeypatch.setitem(REFERENCE, "rotary", watch)
    model = stirred(small_config()).to(cast)
    ids = tokens(model.config, 1, LENGTH)
    model(ids)
    first, seen[:] = [cos for *_, cos in seen], []
    model.float()(ids)
    assert {dtype for *dtypes, _ in seen for dtype in dtypes} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(first, (cos for *_, cos in seen), strict=True))


@pytest.mark.parametrize("compressed", [False, True])
def test_table_is_float32_whatever_the_default_type(compressed):
    config = small_config()
    positions = torch.arange(0, 60000, 999)
    wanted = table(config, positions, compressed)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        got = table(config, positions, compressed)
        assert frequencies(config, compressed).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(got.cos, wanted.cos) and torch.equal(got.sin, wanted.sin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_islands_of_a_built_model_are_float32(dtype):
    model = build_model(small_config(), dtype=dtype)
    types = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    islands = {name for name in types if name.endswith(ISLANDS)}
    # Three layers and the MTP block: two sites of three tensors, a sink; two final collapses; apes; biases.
    assert len(islands) == 4 * (2 * 3 + 1) + 2 * 3 + 3 + 3
    assert {types[name] for name in islands} == {torch.float32}
    assert {t for name, t in types.items() if name not in islands and not name.endswith("tid2eid")} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_logits_of_a_narrow_model_are_float32_and_near(dtype):
    config = small_config(index_topk=512)
    narrow, exact = build_model(config, dtype=dtype), build_model(config)
    exact.load_state_dict(narrow.state_dict())
    ids = tokens(config, 2, LENGTH)
    got, wanted = narrow(ids), exact(ids)
    assert got.dtype == wanted.dtype == torch.float32
    assert (got - wanted).norm() <= 0.05 * wanted.norm()


def test_default_type_is_left_as_it_was():
    build_model(small_config(), dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
