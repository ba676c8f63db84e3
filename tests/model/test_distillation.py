"""The indexer's distillation and recall in the model, against plain softmax attention over a document in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.small import small_config, stirred, tokens
from undertow.model.cache import NoCache
from undertow.model.context import Context, Indexing
from undertow.model.transformer import Transformer, Trunk
from undertow.ops.segments import Segments

LENGTHS = (48, 29, 2)
SEGMENTS = Segments.from_lengths(LENGTHS)
CSA = (1, 3)
STAGES = pytest.mark.parametrize("dense", [False, True])


def build(dtype: torch.dtype = torch.float32, **changes: object) -> Transformer:
    """SWA, CSA, HCA, CSA, of which CSA keeps 3 entries of up to 12."""
    return stirred(small_config(num_hidden_layers=4, compress_ratios=(0, 4, 8, 4, 0), **changes), dtype=dtype)


def ids(model: Transformer) -> Tensor:
    return tokens(model.config, SEGMENTS.tokens)


def run(model: Transformer, **indexing: bool) -> Trunk:
    return model.trunk(ids(model), SEGMENTS, indexing=Indexing(**indexing))


def watched(model: Transformer, **indexing: bool) -> tuple[Trunk, dict[int, Tensor], dict[int, Tensor]]:
    """The pass, and the input and the choice of each CSA layer."""
    inputs, choices = {}, {}
    for layer in CSA:
        block = model.layers[layer]
        block.attn.register_forward_pre_hook(lambda _, given, layer=layer: inputs.update({layer: given[0].detach()}))
        block.attn.indexer.register_forward_hook(lambda _, __, made, layer=layer: choices.update({layer: made}))
    return run(model, **indexing), inputs, choices


def weight_on_entries(model: Transformer, layer: int, x: Tensor, selected: Tensor | None) -> Tensor:
    """Attention probability on each entry of the first document, summed over heads, `[t, s]`."""
    attn, config, length = model.layers[layer].attn, model.config, LENGTHS[0]
    segments = Segments.from_lengths([length])
    context, x = Context(config, ids(model)[:length], segments), x[:length]
    rope = context.rope(compressed=True)
    q = attn.wq_b(attn.q_norm(attn.wq_a(x))).view(length, config.num_attention_heads, -1)
    q = model.ops.rotary(model.ops.rms_norm(q, None, config.rms_norm_eps), rope.cos, rope.sin)
    window = model.ops.rotary(attn.kv_norm(attn.wkv(x)), rope.cos, rope.sin)
    entries = attn.compressor(x, context.entry_rope(4), segments, NoCache(), "tail")
    t, s = torch.arange(length)[:, None], torch.arange(length // 4)
    near = (t - torch.arange(length) >= 0) & (t - torch.arange(length) < config.sliding_window)
    seen = s < (t + 1) // 4
    if selected is not None:
        seen = seen & (selected[:length, :, None] == s).any(1)
    logits = torch.einsum("thc,kc->thk", q, torch.cat([window, entries])) * config.head_dim**-0.5
    logits = logits.masked_fill(~torch.cat([near, seen], 1)[:, None], -torch.inf)
    sink = attn.attn_sink.to(logits.dtype).expand(length, -1)[..., None]
    return torch.softmax(torch.cat([logits, sink], -1), -1)[..., length:-1].sum(1)


def index_scores(model: Transformer, layer: int, x: Tensor) -> Tensor:
    attn, length = model.layers[layer].attn, LENGTHS[0]
    segments = Segments.from_lengths([length])
    context, x = Context(model.config, ids(model)[:length], segments), x[:length]
    q, weights = attn.indexer.queries(x, attn.q_norm(attn.wq_a(x)), context.rope(compressed=True))
    keys = attn.indexer.keys(x, context.entry_rope(4), segments, NoCache()).data
    return torch.einsum("ths,th->ts", torch.einsum("thc,sc->ths", q, keys).relu(), weights)


@STAGES
@torch.no_grad()
def test_divergence_is_that_of_plain_attention(dense):
    model = build().double()
    trunk, inputs, choices = watched(model, dense=dense, distil=True)
    assert len(trunk.distillation) == len(CSA) and all(kl.shape == (SEGMENTS.tokens,) for kl in trunk.distillation)
    for layer, kl in zip(CSA, trunk.distillation, strict=True):
        mass = weight_on_entries(model, layer, inputs[layer], None if dense else choices[layer])
        target = mass / mass.sum(1, keepdim=True)
        share = index_scores(model, layer, inputs[layer]).masked_fill(mass == 0, -torch.inf).log_softmax(-1)
        wanted = torch.where(mass > 0, target * (target.log() - share), 0.0).sum(1)
        torch.testing.assert_close(kl[: LENGTHS[0]], wanted.to(kl.dtype), rtol=1e-5, atol=1e-7)
        assert (kl[: LENGTHS[0]] > 1e-3).sum() >= 20 and (kl[-2:] == 0).all()


@pytest.mark.parametrize("recompute", [(), (1,), (0, 1, 2, 3)])
@pytest.mark.parametrize("variant", ["shared", "own_rank"])
@STAGES
def test_divergence_moves_the_indexer_alone(variant, dense, recompute):
    model = build(indexer=variant)
    trunk = model.trunk(ids(model), SEGMENTS, indexing=Indexing(dense=dense, distil=True), recompute=recompute)
    torch.stack(trunk.distillation).sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moved == {name for name, _ in model.named_parameters() if ".indexer." in name}


@torch.no_grad()
def test_distillation_changes_no_bit_of_the_pass():
    model = build()
    plain, _, chosen = watched(model)
    assert (plain.distillation, plain.recall) == ([], [])
    taught, _, again = watched(model, distil=True, recall=True)
    assert torch.equal(plain.streams, taught.streams)
    assert all(torch.equal(chosen[layer], again[layer]) for layer in CSA)


def test_distillation_changes_no_bit_of_the_other_gradients():
    grads = []
    for distil in (False, True):
        model = build()
        trunk = run(model, distil=distil)
        loss = model.collapse(trunk.streams).square().mean() + sum(kl.sum() for kl in trunk.distillation)
        loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None and ".indexer." not in n})
    assert grads[0].keys() == grads[1].keys()
    assert [name for name in grads[0] if not torch.equal(grads[0][name], grads[1][name])] == []


@torch.no_grad()
def test_dense_layers_read_every_visible_entry():
    model, wide = build(), build(index_topk=12)
    assert torch.equal(run(model, dense=True).streams, run(wide).streams)
    assert not torch.equal(run(model).streams, run(wide).streams)
    _, _, choices = watched(model, dense=True)
    assert choices == {}


@torch.no_grad()
def test_where_nothing_is_dropped_sparse_is_dense():
    model = build(index_topk=12)
    sparse, dense = run(model, distil=True, recall=True), run(model, dense=True, distil=True)
    assert all(torch.equal(a, b) for a, b in zip(sparse.distillation, dense.distillation, strict=True))
    assert [pair.tolist() for pair in sparse.recall] == [[0, 0], [0, 0]]


@STAGES
@torch.no_grad()
def test_recall_of_the_heaviest_entries(dense):
    """Counted on the first document alone: what the others add is the difference to a pass without it."""
    model = build().double()
    others = ids(model)[LENGTHS[0] :], Segments.from_lengths(LENGTHS[1:])
    rest = model.trunk(*others, indexing=Indexing(dense=dense, recall=True))
    trunk, inputs, choices = watched(model, dense=dense, recall=True)
    k = model.config.index_topk
    for place, layer in enumerate(CSA):
        mass = weight_on_entries(model, layer, inputs[layer], None)
        best = mass.topk(k).indices
        hits = (best[:, :, None] == choices[layer][: LENGTHS[0], None]).any(-1).sum(1)
        queries = torch.arange(4 * (k + 1) - 1, LENGTHS[0])
        first = trunk.recall[place] - rest.recall[place]
        assert first.tolist() == [int(hits[queries].sum()), k * len(queries)]
        assert 0 < first[0] < first[1] and rest.recall[place][1] == k * (29 - 15)


@torch.no_grad()
def test_divergence_of_documents_in_pieces():
    model = build()
    whole = run(model, distil=True).distillation
    cache, past, rows = model.new_cache(3), [0, 0, 0], [0, 48, 77]
    for new in ([20, 0, 1], [1, 29, 1], [27, 0, 0]):
        part = torch.cat([torch.arange(r + p, r + p + n) for r, p, n in zip(rows, past, new, strict=True)])
        segments = Segments.from_lengths(new, past)
        trunk = model.trunk(ids(model)[part], segments, cache, indexing=Indexing(distil=True))
        for got, wanted in zip(trunk.distillation, whole, strict=True):
            torch.testing.assert_close(got, wanted[part], rtol=1e-4, atol=1e-5)
        past = [p + n for p, n in zip(past, new, strict=True)]


@STAGES
def test_bf16_stays_finite(dense):
    model = build(torch.bfloat16)
    trunk = run(model, dense=dense, distil=True)
    torch.stack(trunk.distillation).mean().backward()
    grads = [p.grad for name, p in model.named_parameters() if ".indexer." in name]
    assert all(kl.dtype == torch.float32 and torch.isfinite(kl).all() for kl in trunk.distillation)
    assert all(g is not None and torch.isfinite(g).all() for g in grads)


def test_gradient_descent_on_the_divergence_raises_recall():
    model = build()
    indexer = [p for name, p in model.named_parameters() if ".indexer." in name]
    optimizer = torch.optim.AdamW(indexer, lr=1e-2)
    told = []
    for _ in range(20):
        trunk = run(model, dense=True, distil=True, recall=True)
        loss = torch.stack(trunk.distillation).mean()
        told.append((loss.item(), sum(hits / of for hits, of in (pair.tolist() for pair in trunk.recall)) / 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert told[-1][0] < 0.7 * told[0][0]
    assert told[-1][1] > told[0][1] + 0.1
