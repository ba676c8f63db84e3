"""The indexer's own-rank variant against its formula, and what holds for both variants."""

from __future__ import annotations

import pytest
import torch

from tests.model.oracle import randomise
from undertow.config.model import ModelConfig
from undertow.model.cache import NoCache
from undertow.model.rotary import frequencies, table
from undertow.model.transformer import Transformer
from undertow.ops.segments import Segments

LENGTH = 61


def build(**changes: object) -> Transformer:
    config = ModelConfig.from_preset(
        "v4-debug", num_hidden_layers=2, compress_ratios=(4, 4, 0), num_hash_layers=1, **changes
    )
    model = Transformer(config)
    randomise(model, 4)
    return model


def tokens(model: Transformer) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(2))


def rotated(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """`x [T, h, c]` with its trailing pairs turned as complex numbers by position."""
    width = config.qk_rope_head_dim
    pairs = torch.view_as_complex(x[..., -width:].double().unflatten(-1, (-1, 2)).contiguous())
    angle = torch.arange(len(x)).double()[:, None] * frequencies(config, compressed=True).double()
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)
    return torch.cat([x[..., :-width].double(), turned], -1)


@pytest.mark.parametrize("variant", ["shared", "own_rank"])
@torch.no_grad()
def test_selection_follows_the_formula(variant):
    model = build(indexer=variant, index_hadamard=False)
    config, indexer = model.config, model.layers[1].attn.indexer
    seen = {}
    indexer.register_forward_hook(lambda _, inputs, chosen: seen.update(chosen=chosen))
    indexer.weights_proj.register_forward_hook(lambda _, inputs, made: seen.update(x=inputs[0]))
    model.layers[1].attn.q_norm.register_forward_hook(lambda _, inputs, made: seen.update(latent=made))
    model(tokens(model))
    x, latent, segments = seen["x"], seen["latent"], Segments.from_lengths([LENGTH])
    entry_rope = table(config, segments.entry_positions(config.csa_ratio), compressed=True)
    heads, width = config.index_n_heads, config.index_head_dim
    source = latent if variant == "shared" else x @ indexer.wq_a.weight.T
    q = rotated((source @ indexer.wq_b.weight.T).view(-1, heads, width), config)
    keys = indexer.keys(x, entry_rope, segments, NoCache()).data.double()
    weights = (x @ indexer.weights_proj.weight.T).double() * (heads * width) ** -0.5
    scores = torch.einsum("thc,sc->ths", q, keys).relu().mul(weights[..., None]).sum(1)
    for t in range(LENGTH):
        visible = (t + 1) // config.csa_ratio
        best = scores[t, :visible].topk(min(config.index_topk, visible)).indices
        assert set(seen["chosen"][t].tolist()) - {-1} == set(best.tolist()), t


def test_own_rank_has_a_query_path_of_its_own():
    indexer = build(indexer="own_rank").layers[0].attn.indexer
    assert (indexer.wq_a.weight.shape, indexer.wq_b.weight.shape) == ((16, 64), (16 * 16, 16))
    assert not hasattr(build().layers[0].attn.indexer, "wq_a")


@pytest.mark.parametrize("variant", ["shared", "own_rank"])
def test_the_loss_gives_the_indexer_no_gradient(variant):
    model = build(indexer=variant)
    model(tokens(model)).sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is None and n.startswith("layers.")} == {
        n for n, _ in model.named_parameters() if n.startswith("layers.") and ".indexer." in n
    }


@torch.no_grad()
def test_hadamard_rotation_changes_no_selection():
    turned, plain = build(), build(index_hadamard=False)
    plain.load_state_dict(turned.state_dict())
    ids = tokens(turned)
    assert (turned(ids) - plain(ids)).abs().max() == 0
