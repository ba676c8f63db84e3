"""A fresh model is sound: balanced hash tables, a first loss near ln V, nothing uninitialised, the same by seed."""

from __future__ import annotations

import math

import pytest
import torch

from tests.model.small import small_config, tokens
from undertow.config.model import ModelConfig
from undertow.model.build import build_model, hash_table, initialise
from undertow.model.transformer import Transformer


@pytest.mark.parametrize(("experts", "k", "vocabulary"), [(8, 2, 2048), (16, 4, 4096), (8, 8, 100), (6, 1, 61)])
def test_hash_table_loads_every_expert_alike(experts, k, vocabulary):
    table = hash_table(vocabulary, experts, k, torch.Generator().manual_seed(0))
    assert table.shape == (vocabulary, k) and table.dtype == torch.int64
    assert all(len(set(row)) == k for row in table.tolist())
    loads = torch.bincount(table.flatten(), minlength=experts)
    assert len(loads) == experts and loads.max() - loads.min() <= 1


@pytest.mark.parametrize(("experts", "k", "vocabulary"), [(256, 6, 129280), (384, 6, 129280), (7, 3, 4000)])
def test_hash_table_where_rows_do_not_fill_a_permutation(experts, k, vocabulary):
    table = hash_table(vocabulary, experts, k, torch.Generator().manual_seed(0))
    assert (table.sort(-1).values.diff() > 0).all()
    loads = torch.bincount(table.flatten(), minlength=experts).double()
    assert (loads / loads.mean() - 1).abs().max() <= 0.05


def test_hash_tables_of_a_model_are_filled_and_differ_by_layer():
    model = build_model(small_config(num_hash_layers=2))
    first, second = (model.layers[i].ffn.gate.tid2eid for i in range(2))
    assert not torch.equal(first, second)
    assert all((t.sort(-1).values.diff() > 0).all() and t.max() == 7 and t.min() == 0 for t in (first, second))


@pytest.mark.parametrize("name", ["v4-debug", "v4-tiny"])
@torch.no_grad()
def test_first_loss_is_near_that_of_no_knowledge(name):
    config = ModelConfig.from_preset(name)
    model = build_model(config)
    ids = tokens(config, 2, 256)
    out = model(ids, return_mtp=True)
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    draft = torch.nn.functional.cross_entropy(out.mtp_logits[:, :-2].flatten(0, 1), ids[:, 2:].flatten())
    assert abs(loss.item() - math.log(config.vocab_size)) <= 0.1
    assert abs(draft.item() - math.log(config.vocab_size)) <= 0.1


@torch.no_grad()
def test_learned_routers_start_without_a_favourite():
    model = build_model(ModelConfig.from_preset("v4-tiny"))
    seen = []
    for block in model.layers:
        block.ffn.gate.register_forward_hook(lambda _, __, routing: seen.append(routing.indices))
    model(tokens(model.config, 4, 256))
    for indices in seen:
        loads = torch.bincount(indices.flatten(), minlength=model.config.n_routed_experts)
        assert loads.min() > 0.25 * loads.double().mean() and loads.max() < 2.5 * loads.double().mean()


@pytest.mark.parametrize("variant", ["shared", "own_rank"])
def test_every_tensor_is_initialised(variant):
    model = Transformer(small_config(indexer=variant))
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 10**6)
    initialise(model, 0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.isfinite().all() if tensor.is_floating_point() else tensor.max() < 8, name


def test_initial_values():
    config = small_config(hidden_size=128, initializer_range=0.05)
    model = build_model(config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        leaf = name.rsplit(".", 1)[-1]
        if name.endswith("norm.weight") or leaf == "scale":
            assert (tensor == 1).all(), name
        elif leaf in ("ape", "attn_sink", "base", "bias"):
            assert not tensor.any(), name
        elif leaf != "tid2eid":
            assert abs(tensor.std().item() / 0.05 - 1) < 0.1 and abs(tensor.mean().item()) < 0.01, name


def test_seed_decides_every_value_and_type_only_rounds():
    config = small_config()
    state, again, other = (build_model(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(state[name], again[name]) for name in state)
    constant = (".scale", ".base", ".ape", ".attn_sink", ".bias", "norm.weight")
    assert [n for n in state if torch.equal(state[n], other[n]) and not n.endswith(constant)] == []
    narrow = build_model(config, seed=1, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(narrow[name], state[name].to(narrow[name].dtype)) for name in state)


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    build_model(small_config())
    assert torch.equal(torch.rand(3), wanted)


def test_the_default_type_of_torch_changes_no_weight():
    wanted = build_model(ModelConfig.from_preset("v4-debug"), seed=3).state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        got = build_model(ModelConfig.from_preset("v4-debug"), seed=3).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
