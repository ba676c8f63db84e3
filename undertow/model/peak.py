"""The largest number of bytes that a training step holds at once, in closed form: with the reference operators, or in
kernels.

A step holds weights and optimizer state throughout. Its forward pass piles up saved activations; its backward pass
takes them down place by place while gradients grow, each place with a transient of its own; the update then has all
gradients and a workspace. The peak is the largest of these moments. Nothing here imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from undertow.config.model import ModelConfig
from undertow.model.activations import Dtype, Objective, Pass, held_beside, layer_terms, place_of, saved_terms
from undertow.model.modules import freed_at_first, modules_of
from undertow.model.parameters import (
    Parameters,
    all_parameters,
    buffer_bytes,
    collapse_parameters,
    indexer_parameters,
    layer_parameters,
    table_parameters,
)

Basis = Literal["measured", "estimated"]
"""`measured`: a closed form that agrees with a measurement to the byte; `estimated`: one that follows the largest
temporaries of an operator."""

_F32 = 4
_CHUNK = 1 << 22  # elements of logits at once: undertow.ops.reference.cross_entropy
_SCORES = 1 << 23  # elements of attention scores at once: undertow.ops.reference.tiles
_BLOCK = 64  # queries of a block, at most
_LIBRARIES = 64 << 20  # two handles of the matrix library, one a thread
_SPILLED = 1 << 28  # probabilities of attention to entries that the kernels hold at once
_LOGITS, _SLOPES = 512, 2048  # rows of logits and of their gradients at once: undertow.ops.triton.cross_entropy.tiles
_UPDATE = 40  # bytes for each element that an optimizer updates at once: copies, float32 forms, the iteration's


class Part(NamedTuple):
    """`bytes` of the peak under a name, and how they are known."""

    name: str
    bytes: int
    basis: Basis


@dataclass(frozen=True)
class Peak:
    """The peak of a step: its parts, and the `moment` that binds."""

    parts: tuple[Part, ...]
    moment: str

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class State:
    """What is kept per parameter. `accumulates`: gradients live through several forward passes (micro-batches).
    `offloaded`: optimizer state lies in the memory of the host."""

    dtype: Dtype
    optimizer: Literal["muon", "adamw"] = "muon"
    profile: Literal["fp32", "bf16"] = "fp32"
    accumulates: bool = False
    offloaded: bool = False

    @property
    def _low(self) -> bool:
        return self.dtype == "bfloat16"

    def weights(self, p: Parameters) -> int:
        """Bytes of the parameters themselves."""
        return p.low * (2 if self._low else 4) + p.high * 4

    def gradients(self, p: Parameters) -> int:
        """Bytes of their gradients: float32 in profile fp32, the weights' type in profile bf16."""
        return p.low * (2 if self._low and self.profile == "bf16" else 4) + p.high * 4

    def optimizer_state(self, p: Parameters) -> int:
        """Moments, two or Muon's one, and beside bfloat16 weights a float32 copy or the 16 bits that they lack."""
        muon = self.optimizer == "muon"
        low = 2 * p.low - (p.low_matrices if muon else 0)
        high = 2 * p.high - (p.high_matrices if muon else 0)
        narrow = self._low and self.profile == "bf16"
        beside = (2 if narrow else 4) * p.low if self._low else 0
        return low * (2 if narrow else 4) + high * 4 + beside


def _state_on_gpu(state: State, learning: Parameters) -> int:
    """Bytes of optimizer state: all, or of two batches that pass through at once (undertow.optim.host)."""
    everything = state.optimizer_state(learning)
    if not state.offloaded:
        return everything
    batch = 1 << (26 if state.optimizer == "muon" else 24)
    return min(everything, 2 * state.optimizer_state(Parameters(batch, 0, batch, 0, batch)))


class _Moment(NamedTuple):
    """A moment of the backward pass: where, what is still saved, which places have gradients, and the transient."""

    name: str
    saved: int
    gradients: int
    transient: int


def _loss(p: Pass) -> int:
    """Transient of the cross-entropy: of its backward pass, or of the kernels' forward, which makes the gradients."""
    table = p.config.vocab_size * p.config.hidden_size
    if p.kernels:
        chunks = max(1, -(-p.tokens // _SLOPES))
        rows = min(p.tokens, -(-p.tokens // (8 * chunks)) * 8)
        logits = min(_LOGITS, p.tokens) * p.config.vocab_size * _F32
        exact = table * _F32 if chunks > 2 else 0  # a sum of so many parts is float32 until its end
        return logits + rows * (p.config.vocab_size * p.width + p.config.hidden_size * _F32) + exact
    rows = min(p.tokens, max(32, _CHUNK // p.config.vocab_size // 32 * 32))
    chunk = rows * (p.config.vocab_size + p.config.hidden_size) * _F32
    weights = table * _F32 + (p.cast(table) + table * p.width if p.width == 2 else 0)
    return weights + chunk + p.tokens * p.config.hidden_size * p.width


def _site(p: Pass) -> tuple[int, int]:
    """Transients of a site's backward pass: of writing its output back, and of its stream weights."""
    streams = p.tokens * p.config.hc_mult * p.config.hidden_size
    if p.kernels:  # gradients of streams and of one of them, in and out
        both = (2 * streams + p.tokens * p.config.hidden_size) * p.width
        return both, both
    trajectory = (2 * p.config.hc_sinkhorn_iters - 1) * p.config.hc_mult * (p.config.hc_mult + 1) * p.tokens * _F32
    back = streams * (16 if p.width == 2 else 8) + p.tokens * p.config.hidden_size * (6 + 2 * p.width)
    return back, 2 * streams * p.width + max(5 * streams * _F32, trajectory)


def _experts(p: Pass, accumulates: bool) -> int:
    """Transient of the routed experts' backward pass: the activation's gradients in float32, or the rows around it. The
    kernels' gradients of weights are the parameters' own, unless they are added to earlier ones."""
    config, rows = p.config, p.tokens * p.config.num_experts_per_tok
    d, inner = config.hidden_size, config.moe_intermediate_size
    activation = rows * inner * (36 if p.width == 2 else 38)
    scattered = rows * (2 * d + 2 * inner) * p.width
    weights = config.n_routed_experts * 2 * inner * d * p.width
    around = p.tokens * d * (config.hc_mult + 2) * p.width
    if p.kernels:
        return around + rows * (d + 2 * inner) * p.width + (weights if accumulates else 0)
    return around + max(activation, scattered + weights)


def _attention(p: Pass, layer: int) -> int:
    """Transient of attention's backward pass: products in float32 of all queries, or the tiles of a group of them."""
    config, longest = p.config, max(p.documents, default=0)
    heads, wide = config.num_attention_heads, config.num_attention_heads * config.head_dim
    ratio = config.compress_ratios[layer]
    if p.kernels:
        entries = longest // ratio if config.kind(layer) == "csa" else _BLOCK // 2 if ratio else 0
        slab = min(p.tokens, max(_BLOCK, _SPILLED // (heads * max(entries, 1))))
        # P and dS of the window, of the block before it and of entries; gradients of queries, and of keys in float32.
        spilled = slab * heads * (config.sliding_window + _BLOCK + entries) * 2 * p.width
        partial = p.tokens * 3 * config.head_dim * _F32
        around = p.tokens * config.hidden_size * (config.hc_mult + 1) * p.width
        return around + p.tokens * wide * p.width + spilled + partial
    keys = max(config.sliding_window + _BLOCK - 1, longest // ratio if ratio else 0)
    rows = min(p.tokens, max(_BLOCK, _SCORES // (heads * keys)))
    tiles = rows * (5 * wide + 3 * heads * keys) * _F32
    streams = p.tokens * config.hidden_size * (config.hc_mult + 1) * p.width
    return streams + max(16 * p.tokens * wide, 2 * p.tokens * wide * p.width + tiles)


def _distillation(p: Pass) -> int:
    """Transient of the distillation's backward pass: scores of a group of queries, and the gradients of all."""
    config = p.config
    index, heads = config.index_n_heads, config.num_attention_heads
    if p.kernels:
        around = p.tokens * config.hidden_size * (config.hc_mult + 1) * p.width
        return around + 2 * p.tokens * index * config.index_head_dim * p.width
    visible = max(max(p.documents, default=0) // config.csa_ratio, 1)
    rows = min(p.tokens, max(_BLOCK, _SCORES // (max(index, heads) * visible)))
    gathered = 2 * index * config.index_head_dim + heads * config.head_dim
    streams = p.tokens * config.hidden_size * (config.hc_mult + 1) * p.width
    return streams + rows * (9 * index * visible + gathered * _F32) + p.tokens * index * config.index_head_dim * _F32


def _layer_moments(
    p: Pass, layer: int, o: Objective, before: int, gradients: int, accumulates: bool
) -> Iterator[_Moment]:
    """Moments of one layer's backward pass; `before` is what earlier places still have saved."""
    place, terms = place_of(p.config, layer), layer_terms(p, layer, o)
    of: dict[str, int] = defaultdict(int)
    for term in terms:
        of[term.module] += term.bytes
        of[f"{term.module} {term.name}"] += term.bytes
    modules = modules_of(o.recompute, layer)
    back, site = _site(p)
    early = sum(freed_at_first(each, term.bytes) for term in terms for each in term.freed_by & modules)
    left = before + sum(term.bytes for term in terms) - early
    yield _Moment(f"{place}: output of the experts", left, gradients, back)
    left -= of["mixers output of the experts"] + of["moe activation"] + of["moe shared expert"]
    yield _Moment(f"{place}: experts", left, gradients, _experts(p, accumulates))
    left -= of["moe"] - of["moe activation"] - of["moe shared expert"] + of["norms"] // 2
    yield _Moment(f"{place}: stream weights", left, gradients, site)
    left -= (of["mixers streams"] + of["mixers coefficients"]) // 2
    left += early  # what modules of the attention's half bring back is there when that of the experts' has gone
    if of["indexer"]:
        yield _Moment(f"{place}: distillation", left, gradients, _distillation(p))
    left -= of["attention de-rotated output"]
    yield _Moment(f"{place}: attention", left, gradients, _attention(p, layer))


def _moments(p: Pass, o: Objective, state: State) -> Iterator[_Moment]:
    """Moments of the backward pass, in its order."""
    config, depth = p.config, p.config.num_hidden_layers
    saved: dict[str, int] = defaultdict(int)
    for term in saved_terms(config, p.documents, p.dtype, o, kernels=p.kernels):
        saved[term.place] += term.bytes
    left, done = sum(saved.values()), 0
    everything = state.gradients(trained(config, o))

    def with_gradients_of(*new: Parameters) -> int:
        nonlocal done
        done = min(everything, done + sum(state.gradients(each) for each in new))
        return everything if state.accumulates else done

    def at_loss(*new: Parameters) -> int:
        """Kernels make the head's gradient in the forward pass, and it counts as saved until the backward pass."""
        made = with_gradients_of(*new)
        return made if state.accumulates or not p.kernels else 0

    tables = table_parameters(config)
    if saved["mtp block"]:
        q = p.without_last()
        yield _Moment("mtp head: loss", left, at_loss(tables), _loss(q))
        left -= saved["mtp head"] + saved["mtp block"]
        made = with_gradients_of(tables, layer_parameters(config, depth))
        yield from _layer_moments(q, depth, o, left, made, state.accumulates)
        left -= saved["mtp input"]
    yield _Moment("head: loss", left, at_loss(collapse_parameters(config)), _loss(p))
    left -= saved["head"]
    for layer in reversed(range(depth)):
        left -= saved[place_of(config, layer)]
        made = with_gradients_of(layer_parameters(config, layer))
        yield from _layer_moments(p, layer, o, left, made, state.accumulates)


def trained(config: ModelConfig, objective: Objective) -> Parameters:
    """Parameters that get a gradient: all, less the indexers' without distillation."""
    everything = all_parameters(config)
    if objective.distil:
        return everything
    csa = sum(config.kind(layer) == "csa" for layer in range(config.num_hidden_layers))
    still = indexer_parameters(config)
    low, high, low_matrices, high_matrices = (a - csa * b for a, b in zip(everything[:4], still[:4], strict=True))
    return Parameters(low, high, low_matrices, high_matrices, everything.largest)


def peak_bytes(
    config: ModelConfig,
    documents: Sequence[int],
    state: State,
    objective: Objective | None = None,
    *,
    gpu: bool = True,
    kernels: bool = False,
) -> Peak:
    """The peak of a step whose largest forward pass takes documents of the given lengths.

    `kernels`: every operator that has a kernel runs in it, as on a GPU in bfloat16 unless a recipe says otherwise. On a
    GPU the update works on more at once, and matrix libraries keep workspaces. Rounding and slack of an allocator
    are not counted: compare with `torch.cuda.max_memory_allocated`, not with what a driver shows.
    """
    o = objective or Objective()
    p, learning = Pass(config, tuple(documents), state.dtype, kernels), trained(config, o)
    whole = sum(term.bytes for term in saved_terms(config, documents, state.dtype, o, kernels=kernels))
    at_once = min(1 << (24 if gpu else 16), learning.low + learning.high)
    in_place = kernels and state.optimizer == "adamw"
    update = _Moment("update", 0, state.gradients(learning), 0 if in_place else at_once * _UPDATE)
    top = max((*_moments(p, o, state), update), key=lambda moment: moment.saved + moment.gradients + moment.transient)
    parts = (
        Part("weights", state.weights(all_parameters(config)), "measured"),
        Part("buffers", buffer_bytes(config), "measured"),
        Part("optimizer state", _state_on_gpu(state, learning) if gpu else state.optimizer_state(learning), "measured"),
        Part("gradients", top.gradients, "measured" if top is update or state.accumulates else "estimated"),
        Part("saved for backward", top.saved, "measured" if top.saved == whole else "estimated"),
        Part("held beside", held_beside(p, o), "estimated"),
        Part("transient", top.transient, "estimated"),
        Part("library workspaces", _LIBRARIES if gpu else 0, "estimated"),
    )
    return Peak(parts, top.name)
