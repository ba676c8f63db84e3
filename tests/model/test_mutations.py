"""Parity notices mistakes: each of these, made in our model alone, moves its logits far from transformers'."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.model.cases import Plan, draw, logit_error
from tests.model.oracle import native_name
from undertow.config.model import RopeScaling
from undertow.model import rotary
from undertow.model.block import Block, Layer
from undertow.model.hyper import HyperConnection
from undertow.model.moe import SharedExpert
from undertow.model.router import Router
from undertow.model.transformer import Transformer
from undertow.ops.reference.hyper import hyper_collapse, project
from undertow.ops.reference.linear import linear
from undertow.ops.reference.norm import rms_norm
from undertow.ops.registry import REFERENCE

CLEAR = 1e-3

# All layer kinds, the CSA layer last so that its first window counts; a tight clamp and a short original length.
SHAPE = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, head_dim=24, qk_rope_head_dim=8,
    q_lora_rank=12, o_groups=2, o_lora_rank=8, sliding_window=8, index_n_heads=16, index_head_dim=16, index_topk=4,
    hc_mult=4, hc_sinkhorn_iters=20, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
    num_hash_layers=1, routed_scaling_factor=1.5, swiglu_limit=0.3, rope_theta=10000.0, compress_rope_theta=160000.0,
    kinds=[0, 1, 2, 1], csa_ratio=4, hca_ratio=16, original=64, factor=16.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def oracle():
    """Token ids, transformers' logits and its weights under our names."""
    models, ids, _ = draw(Plan(3000, SHAPE, batch=2, length=77))
    with torch.no_grad():
        logits = models.theirs(ids).logits
    state = {native_name(name): tensor for name, tensor in models.theirs.state_dict().items()}
    return models.config, ids, logits, state


@pytest.fixture
def parity_error(oracle) -> Callable[[], float]:
    """The error of a model built now, out of whatever the operators and modules are now."""
    config, ids, wanted, state = oracle

    @torch.no_grad()
    def measure() -> float:
        ours = Transformer(config)
        ours.load_state_dict(state)
        return logit_error(ours(ids), wanted)

    return measure


def operator(patch: pytest.MonkeyPatch, name: str, change: Callable[..., object]) -> None:
    """Replace an operator by `change(original, *arguments, **keywords)`."""
    original = REFERENCE[name]
    patch.setitem(REFERENCE, name, lambda *arguments, **keywords: change(original, *arguments, **keywords))


def mixing_axes_swapped(patch):
    operator(patch, "hyper_expand", lambda op, y, post, mix, x: op(y, post, mix.transpose(1, 2).contiguous(), x))


def post_not_doubled(patch):
    operator(patch, "hyper_expand", lambda op, y, post, mix, x: op(y, post / 2, mix, x))


def sinkhorn_stopped_after_one_step(patch):
    operator(patch, "hyper_in", lambda op, *given, **keywords: op(*given[:6], 1, *given[7:], **keywords))


def overlaps(slots: Tensor) -> bool:
    return slots.shape[1] == 2 * SHAPE["csa_ratio"]


def overlap_halves_swapped(patch):
    """Both halves of the channels trade places, with the gates' offsets that belong to them."""

    def change(op, u, v, ape, slots, state=None, **keywords):
        if overlaps(slots):
            u, v, ape = (x.roll(len(x) // 2, 0) for x in (u, v, ape))
        return op(u, v, ape, slots, state, **keywords)

    operator(patch, "compress_pool", change)


def zero_gate_in_first_window(patch):
    """The absent overlap slots of the first window take part with gate and value 0."""

    def change(op, u, v, ape, slots, state=None, **keywords):
        if overlaps(slots):
            slots = torch.where(slots < 0, len(u), slots)
            u, v = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (u, v))
        return op(u, v, ape, slots, state, **keywords)

    operator(patch, "compress_pool", change)


def gate_offsets_shifted(patch):
    """Every slot reads the positional gate of the slot before it."""
    operator(
        patch, "compress_pool", lambda op, u, v, ape, *rest, **keywords: op(u, v, ape.roll(1, 0), *rest, **keywords)
    )


def shared_expert_not_clamped(patch):
    def forward(self, x):
        return self.w2(self.ops.swiglu(self.w1(x), self.w3(x), math.inf))

    patch.setattr(SharedExpert, "forward", forward)


def gate_clamped_below_too(patch):
    operator(patch, "swiglu", lambda op, gate, up, limit, *w: op(gate.clamp(min=-limit), up, limit, *w))


def frequencies_with(patch, **changes):
    original = rotary.frequencies
    patch.setattr(rotary, "frequencies", lambda config, *rest: original(config.model_copy(update=changes), *rest))


def rope_theta_in_compressed_layers(patch):
    frequencies_with(patch, compress_rope_theta=SHAPE["rope_theta"])


def no_yarn(patch):
    frequencies_with(patch, rope_scaling=RopeScaling(factor=1.0))


def norm_before_collapse(patch):
    """Both sites of a layer normalise each stream and then sum them, instead of the other way round."""

    def collapse(self, streams):
        config = self.config
        logits = project(streams, self.fn, config.rms_norm_eps, self.ops.linear)
        pre, post, mix = self.ops.hyper_coefficients(
            logits, self.scale, self.base, config.hc_sinkhorn_iters, config.hc_eps
        )
        return self.ops.hyper_collapse(rms_norm(streams, None, config.rms_norm_eps), pre), post, mix

    def forward(self, streams, context, cache, replay=None, recorded=None, again=None):
        x, post, mix = self.hc_attn(streams)
        y, indexed = self.attn(x * self.attn_norm.weight, context, cache)
        streams = self.ops.hyper_expand(y, post, mix, streams)
        x, post, mix = self.hc_ffn(streams)
        y, routing = self.ffn(x * self.ffn_norm.weight, context.ids, replay)
        return Layer(self.ops.hyper_expand(y, post, mix, streams), routing, indexed)

    patch.setattr(HyperConnection, "forward", collapse)
    patch.setattr(Block, "forward", forward)


def norm_before_final_collapse(patch):
    def head(op, streams, fn, scale, base, weight, eps_norm, eps, **keywords):
        normed = rms_norm(streams, weight, eps_norm)
        return hyper_collapse(normed, torch.sigmoid(project(normed, fn, eps_norm, linear) * scale + base) + eps)

    operator(patch, "hyper_head", head)


def no_inverse_rotation(patch):
    operator(patch, "rotary", lambda op, x, cos, sin, inverse=False: x if inverse else op(x, cos, sin))


def half_split_rotation(patch):
    """Channel `i` is paired with `i + R` instead of its neighbour."""

    def change(op, x, cos, *rest, **named):
        order = torch.arange(2 * cos.shape[-1]).view(2, -1).t().flatten() + x.shape[-1] - 2 * cos.shape[-1]
        order = torch.cat([torch.arange(int(order.min())), order])
        return op(x[..., order], cos, *rest, **named)[..., order.argsort()]

    operator(patch, "rotary", change)
    operator(patch, "head_norm_rotary", change)


def attention(patch, change):
    """Replace arguments of sparse attention: `change(arguments) -> new ones`."""

    def call(op, q, window, entries, selected, sink, segments, **keywords):
        named = dict(keywords, q=q, window=window, entries=entries, selected=selected, sink=sink, segments=segments)
        return op(**(named | change(named)))

    operator(patch, "sparse_attention", call)
    operator(patch, "csa_attention", call)


def no_sink(patch):
    attention(patch, lambda given: dict(sink=torch.full_like(given["sink"], -1e30)))


def window_one_shorter(patch):
    attention(patch, lambda given: dict(window_size=given["window_size"] - 1))


def window_one_longer(patch):
    attention(patch, lambda given: dict(window_size=given["window_size"] + 1))


def entries_one_token_late(patch):
    """The query that completes a group does not see its entry yet."""

    def change(given):
        if given["entries"] is None:
            return {}
        limit = (given["segments"].positions // given["ratio"])[:, None]
        chosen = given["selected"]
        if chosen is None:
            chosen = torch.arange(int(limit.max()) + 1).expand(len(limit), -1)
        return dict(selected=torch.where(chosen < limit, chosen, -1))

    attention(patch, change)


def every_entry_selected(patch):
    attention(patch, lambda given: dict(selected=None))


def bias_in_router_weights(patch):
    def change(op, logits, bias, k, scale, chosen=None):
        indices, weights, scores = op(logits, bias, k, scale, chosen)
        if bias is None:
            return indices, weights, scores
        picked = (scores + bias).gather(-1, indices)
        return indices, scale * picked / picked.sum(-1, keepdim=True), scores

    operator(patch, "route", change)


def bias_not_in_router_choice(patch):
    operator(patch, "route", lambda op, logits, bias, *rest: op(logits, None, *rest))


def hash_layer_routed_by_score(patch):
    original = Router.forward

    def forward(self, x, ids, replay=None):
        indices = x.float().mm(self.weight.t()).topk(self.config.num_experts_per_tok).indices
        return original(self, x, ids, indices if self.hashed else replay)

    patch.setattr(Router, "forward", forward)


MUTATIONS = [
    mixing_axes_swapped, overlap_halves_swapped, zero_gate_in_first_window, shared_expert_not_clamped,
    rope_theta_in_compressed_layers, norm_before_collapse, norm_before_final_collapse, post_not_doubled,
    sinkhorn_stopped_after_one_step, gate_offsets_shifted, gate_clamped_below_too, no_yarn, no_inverse_rotation,
    half_split_rotation, no_sink, window_one_shorter, window_one_longer, entries_one_token_late, every_entry_selected,
    bias_in_router_weights, bias_not_in_router_choice, hash_layer_routed_by_score,
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mistake_breaks_parity(mutate, parity_error, monkeypatch):
    assert parity_error() <= 2e-5
    with monkeypatch.context() as patch:
        mutate(patch)
        error = parity_error()
    assert error > CLEAR
    assert parity_error() <= 2e-5
