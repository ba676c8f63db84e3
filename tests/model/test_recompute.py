"""Recomputed layers and modules: the same gradients to the bit, by the first run's choices, from their inputs alone."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from tests.model.saved import LiveBytes
from tests.model.small import small_config, stirred, tokens
from undertow.config.errors import InputError
from undertow.model.activations import Objective, Pass, kept_terms
from undertow.model.context import Indexing
from undertow.model.modules import MODULES, WITHIN_MOE, Again
from undertow.model.transformer import Transformer, Trunk
from undertow.ops.segments import Segments

SEGMENTS = Segments.from_lengths([48, 1, 29])
ALL = (0, 1, 2, 3)
DISTIL = Indexing(distil=True)
PARTS = {module: tuple((layer, module) for layer in ALL) for module in MODULES}
PARTS["with moe"] = tuple((layer, module) for layer in ALL for module in MODULES if module not in WITHIN_MOE)
PARTS["without moe"] = tuple((layer, module) for layer in ALL for module in MODULES if module != "moe")
PARTS["beside whole layers"] = (0, (1, "query"), (1, "attention_core"), 2, (3, "moe"))


def build() -> Transformer:
    """SWA with hash routing, CSA, HCA, CSA, and an MTP block."""
    return stirred(small_config(num_hidden_layers=4, compress_ratios=(0, 4, 8, 4, 0)))


def forward(model: Transformer, recompute: tuple[Again, ...] = (), indexing: Indexing = DISTIL) -> tuple[Trunk, Tensor]:
    """The pass and an objective that every output reaches."""
    ids = tokens(model.config, SEGMENTS.tokens)
    trunk = model.trunk(ids, SEGMENTS, indexing=indexing, recompute=recompute)
    hidden = model.collapse(trunk.streams)
    loss = model.ops.linear_cross_entropy(hidden, model.head.weight, ids.roll(-1))[0].mean()
    drafted = model.mtp_hidden(trunk.streams, ids, SEGMENTS)
    loss = loss + model.ops.linear_cross_entropy(drafted.hidden, model.head.weight, ids[drafted.rows])[0].mean()
    shares = [route.scores / route.scores.sum(-1, keepdim=True) for route in (*trunk.routes, drafted.routing)]
    loss = loss + sum((share.mean(0) * torch.arange(share.shape[1])).sum() for share in shares)
    return trunk, loss + sum(kl.mean() for kl in trunk.distillation)


def gradients(model: Transformer, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differing(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert got.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(got[name], wanted[name])]


@pytest.mark.parametrize("indexing", [Indexing(), DISTIL, Indexing(dense=True, distil=True, recall=True)])
@pytest.mark.parametrize("recompute", [(0,), (1,), (2,), (1, 3), ALL, *PARTS.values()], ids=str)
def test_gradients_are_the_same_to_the_bit(recompute, indexing):
    model = build()
    trunk, loss = forward(model, indexing=indexing)
    again, recomputed = forward(model, recompute, indexing)
    assert torch.equal(loss, recomputed)
    assert [pair.tolist() for pair in trunk.recall] == [pair.tolist() for pair in again.recall]
    assert differing(gradients(model, recomputed), gradients(model, loss)) == []


def upset(model: Transformer) -> None:
    """Turn every choice over without touching what the chosen compute: biases of the router, signs of the indexer."""
    with torch.no_grad():
        for block in model.layers:
            if not block.ffn.gate.hashed:
                block.ffn.gate.bias += torch.linspace(3, -3, len(block.ffn.gate.bias))
            if block.attn.kind == "csa":
                block.attn.indexer.weights_proj.weight.neg_()


@pytest.mark.parametrize("recompute", [ALL, PARTS["moe"], PARTS["with moe"]], ids=["layers", "moe", "modules"])
def test_choices_are_those_of_the_first_run(recompute):
    """All that chooses is turned over between forward and backward; chosen anew, the gradients would be others."""
    model = build()
    wanted = gradients(model, forward(model, indexing=Indexing())[1])
    _, loss = forward(model, recompute, Indexing())
    upset(model)
    assert differing(gradients(model, loss), wanted) == []
    anew = gradients(model, forward(model, indexing=Indexing())[1])
    for layer in (1, 2, 3):
        assert any(name.startswith(f"layers.{layer}.ffn.experts") for name in differing(anew, wanted))
    assert "layers.1.attn.compressor.wkv.weight" in differing(anew, wanted)


@pytest.mark.parametrize("recompute", [ALL, PARTS["with moe"]], ids=["layers", "modules"])
def test_nothing_is_chosen_in_the_backward_pass(recompute):
    model, chosen = build(), []
    for layer, block in enumerate(model.layers):
        block.ffn.gate.register_forward_pre_hook(
            lambda _, inputs, layer=layer: chosen.append(layer) if inputs[2] is None else None
        )
        if block.attn.kind == "csa":
            block.attn.indexer.register_forward_pre_hook(lambda *_, layer=layer: chosen.append(f"entries {layer}"))
    _, loss = forward(model, recompute)
    assert chosen == [0, "entries 1", 1, 2, "entries 3", 3]
    loss.backward()
    assert len(chosen) == 6


def test_replayed_experts_are_replayed_in_the_backward_pass():
    model, ids = build(), tokens(small_config(), SEGMENTS.tokens)
    other = [route.indices.roll(1, 0) for route in model.trunk(ids, SEGMENTS).routes]
    grads = []
    for recompute in ((), ALL, PARTS["moe"]):
        trunk = model.trunk(ids, SEGMENTS, replay=other, recompute=recompute)
        assert all(torch.equal(r.indices, o) for r, o in zip(trunk.routes, other, strict=True))
        grads.append(gradients(model, trunk.streams.square().mean()))
    assert differing(grads[1], grads[0]) == [] == differing(grads[2], grads[0])


def kept(model: Transformer, recompute: tuple[Again, ...]) -> tuple[int, Trunk]:
    """Bytes that autograd saves for backward, each storage once and without parameters and buffers."""
    owned = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    storages: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        storages.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        trunk = model.trunk(tokens(model.config, SEGMENTS.tokens), SEGMENTS, indexing=DISTIL, recompute=recompute)
    return sum(x.untyped_storage().nbytes() for p, x in storages.items() if p not in owned), trunk


def test_a_recomputed_layer_keeps_its_input_only():
    model = build()
    rows, row = SEGMENTS.tokens, model.config.hidden_size * 4
    streams = rows * row * model.config.hc_mult
    everything, _ = kept(model, ())
    inputs, trunk = kept(model, ALL)
    # The first layer's input is the embedding itself, one stream wide; its token ids are kept with it.
    assert inputs == rows * row + 3 * streams + rows * 8
    assert everything > 10 * inputs
    but_one, _ = kept(model, (0, 1, 2))
    assert inputs < but_one < everything / 2
    assert trunk.distillation[0].requires_grad


def test_what_a_recomputed_layer_holds_beside_tensors_of_autograd_is_small():
    """Operators hold choices and index tables as plain attributes, which no hook sees: no activation may be one."""

    def live() -> list[Tensor]:
        gc.collect()
        return [t for t in gc.get_objects() if type(t) is Tensor and t.is_floating_point()]

    model, rows = build(), SEGMENTS.tokens
    ids, d = tokens(model.config, rows), model.config.hidden_size
    before = {id(t) for t in live()}
    trunk = model.trunk(ids, SEGMENTS, indexing=DISTIL, recompute=ALL)
    large = [t.shape for t in live() if id(t) not in before and t.numel() >= rows * d]
    assert set(large) <= {(rows, d), (rows, model.config.hc_mult, d)}, large
    # The embedding, its four copies, and what the layers hand on.
    assert len(large) <= 2 + len(ALL) and trunk.streams.requires_grad


@pytest.mark.parametrize("name", [*MODULES, "with moe"])
def test_each_module_runs_once_more(name):
    """However many operators read what it made; results of other modules that it starts from are made once."""
    model, calls = build(), []
    block = model.layers[1]
    parts = {
        "mixer_norm": block.hc_ffn, "query": block.attn.wq_b, "output": block.attn.wo_a,
        "shared_expert": block.ffn.shared_experts, "moe": block.ffn.gate,
    }  # fmt: skip
    for part, module in parts.items():
        module.register_forward_hook(lambda *_, part=part: calls.append(part))
    _, loss = forward(model, PARTS[name])
    calls.clear()
    loss.backward()
    wanted = {name} & parts.keys() if name != "with moe" else set(parts)
    assert sorted(calls) == sorted(wanted | ({"shared_expert"} if "moe" in wanted else set()))


def test_modules_where_the_indexer_learns_alone():
    model, grads = build(), []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)
    for recompute in ((), PARTS["with moe"], PARTS["without moe"]):
        trunk = model.trunk(tokens(model.config, SEGMENTS.tokens), SEGMENTS, indexing=DISTIL, recompute=recompute)
        grads.append(gradients(model, sum(kl.mean() for kl in trunk.distillation)))
    assert grads[0] and differing(grads[1], grads[0]) == [] == differing(grads[2], grads[0])


def test_hooks_around_the_pass_get_what_is_kept():
    model, grads = build(), []
    for recompute in ((), PARTS["with moe"]):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy().copy(), torch.from_numpy):
            _, loss = forward(model, recompute)
        grads.append(gradients(model, loss))
    assert differing(*grads) == []


def test_a_graph_that_is_kept_is_read_twice():
    model = build()
    _, loss = forward(model, PARTS["with moe"])
    once = [g.clone() for g in torch.autograd.grad(loss, [model.embed.weight], retain_graph=True)]
    assert torch.equal(torch.autograd.grad(loss, [model.embed.weight])[0], once[0])


def test_modules_hold_what_they_are_said_to_and_nothing_afterwards():
    """Storages that are alive, not those that autograd names: no cycle or result of a module keeps others."""
    model, ids = build(), tokens(small_config(), SEGMENTS.tokens)
    model.trunk(ids, SEGMENTS, indexing=Indexing()).streams.sum().backward()  # makes what later passes share
    sizes, ends, peaks, names = {}, {}, {}, ("query", "with moe", "without moe")
    for name in ("none", *names):
        recompute = PARTS.get(name, ())
        model.zero_grad()
        gc.collect()
        gc.disable()
        try:
            with LiveBytes([*model.parameters(), *model.buffers(), ids]) as meter:
                before = meter.live
                streams = model.trunk(ids, SEGMENTS, indexing=Indexing(), recompute=recompute).streams
                sizes[name] = meter.live - before
                streams.sum().backward()
                peaks[name] = meter.peak - before
                del streams
                model.zero_grad()
                ends[name] = meter.live - before
        finally:
            gc.enable()
    assert max(ends[name] for name in names) < SEGMENTS.tokens * model.config.hidden_size * 2, ends
    p = Pass(model.config, SEGMENTS.new, "float32")
    for name in names:
        told = [kept_terms(p, layer, Objective(distil=False, recompute=frozenset(PARTS[name]))) for layer in ALL]
        all_kept = [kept_terms(p, layer, Objective(distil=False)) for layer in ALL]
        less = sum(t.bytes for terms in all_kept for t in terms) - sum(t.bytes for terms in told for t in terms)
        assert sizes["none"] - sizes[name] == pytest.approx(less, abs=0.02 * sizes["none"]), name
        assert peaks[name] < peaks["none"]


@torch.no_grad()
@pytest.mark.parametrize("recompute", [ALL, PARTS["with moe"]], ids=["layers", "modules"])
def test_without_gradients_nothing_is_wrapped(recompute):
    model = build()
    assert torch.equal(forward(model)[1], forward(model, recompute)[1])
    assert not forward(model, recompute)[0].streams.requires_grad


def test_refusals():
    model, ids = build(), tokens(small_config(), 5)
    segments = Segments.from_lengths([5])
    with pytest.raises(InputError) as error:
        model.trunk(ids, segments, model.new_cache(1), recompute=(3, 1))
    assert str(error.value) == "recompute of layers [1, 3] with a cache: training has none; leave out either"
    for wrong, message in {
        (2, "queries"): "recompute names module 'queries' of layer 2: known are mixer_norm, query, ",
        (1, "query"): "recompute names query of layer 1 and the layer, which contains it; name one",
        (3, "shared_expert"): "recompute names shared_expert of layer 3 and its moe, which contains it; name one",
        (7, "moe"): "recompute names layer 7: the trunk has layers 0 to 3",
    }.items():
        with pytest.raises(InputError) as error:
            model.trunk(ids, segments, recompute=(1, (3, "moe"), wrong))
        assert str(error.value).startswith(message)
    for layer in (4, -1):
        with pytest.raises(InputError) as error:
            model.trunk(ids, segments, recompute=(layer,))
        assert str(error.value) == f"recompute names layer {layer}: the trunk has layers 0 to 3"
