"""Bytes that one microbatch keeps for its backward pass on one rank, by implementation, place and tensor.

Three implementations are known. `tight` is what a fully fused one must keep; `primus` is what the autograd functions of
the published MI355X run keep (fused kernels, one kernel for dispatch and experts, whose first product has the rows of
the worst case); `reference` is Undertow's own operators, plain or in kernels. The first two are in bfloat16 for
sequences of one document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.presets import nearest
from undertow.model.activations import Dtype, Objective, Pass, Term, layer_terms
from undertow.planner.geometry import Batch, Geometry
from undertow.planner.memory.recompute import Module

Implementation = Literal["tight", "primus", "reference"]

_F32, _I32, _I64, _BF16 = 4, 4, 8, 2
_ALIGNMENT = 256  # rows of a tile of the pool
_PADDED = 576  # width to which that run's attention kernel pads a query head of 512


class Saved(NamedTuple):
    """Bytes of one kept tensor, or of several of a kind, under a name.

    `module` is what frees them if it is computed again by itself, and `moe` whether computing the experts again does.
    `for_weight`: weight gradients read them, so that they stay where these are put off.
    """

    name: str
    bytes: int
    module: Module | None = None
    for_weight: bool = False
    moe: bool = False


def implementation_of(name: str) -> Implementation:
    """The implementation of that name. Raises `ConfigError` with the nearest one."""
    known = get_args(Implementation)
    if name not in known:
        raise ConfigError(f"unknown implementation '{name}'{nearest(name, list(known))} (known: {', '.join(known)})")
    return name  # type: ignore[return-value]


@dataclass(frozen=True)
class Microbatch:
    """One forward pass on one rank. `rows` are the tokens of attention; streams, norms and experts have `own`, its part
    where tensor parallelism splits a sequence. Type, objective and whether the operators are `kernels` matter to the
    reference alone."""

    config: ModelConfig
    geometry: Geometry
    batch: Batch
    implementation: Implementation
    dtype: Dtype = "bfloat16"
    objective: Objective = field(default_factory=lambda: Objective(distil=False))
    kernels: bool = False

    @property
    def rows(self) -> int:
        """Tokens that attention sees on the rank."""
        return self.batch.tokens(self.geometry)

    @property
    def own(self) -> int:
        """Tokens whose streams lie on the rank."""
        return self.rows // self.geometry.tensor

    @property
    def streams(self) -> int:
        """Bytes of all streams of the rank's tokens: what a recomputed layer keeps, and a stage passes on."""
        width = 4 if self.dtype == "float32" and self.implementation == "reference" else 2
        return self.own * self.config.hc_mult * self.config.hidden_size * width

    @property
    def pass_(self) -> Pass:
        """The forward pass as the reference's closed forms take it: one document a sequence, or its part."""
        length = self.batch.sequence_length // self.geometry.context
        return Pass(self.config, (length,) * self.batch.micro_batch, self.dtype, self.kernels)


def pool_rows(config: ModelConfig, geometry: Geometry, tokens: int) -> int:
    """Rows of a pool that holds whatever the ranks of an expert group may send: every token of all of them to as many
    local experts as it chooses, and each expert's rows filled up to whole tiles."""
    local = config.n_routed_experts // geometry.expert
    rows = geometry.expert * tokens * min(config.num_experts_per_tok, local) + local * (_ALIGNMENT - 1)
    return -(-rows // _ALIGNMENT) * _ALIGNMENT


def symmetric_heap(config: ModelConfig, geometry: Geometry, tokens: int) -> int:
    """Bytes of the symmetric buffers of one kernel for dispatch and experts: the pool twice, and returned rows."""
    d = config.hidden_size * _BF16
    return 2 * pool_rows(config, geometry, tokens) * d + tokens * config.num_experts_per_tok * d


def check_pool(config: ModelConfig, geometry: Geometry) -> None:
    """Raises `ConfigError` where one kernel for dispatch and experts cannot run."""
    if geometry.tensor != 1:
        raise ConfigError(
            f"implementation primus: its expert kernel needs tensor 1, given {geometry.tensor}; take tensor 1 or "
            "implementation tight"
        )
    if not 1 < geometry.expert <= 8:
        raise ConfigError(
            f"implementation primus: its expert kernel needs expert 2 to 8, in one node, given {geometry.expert}; take "
            "one of those or implementation tight"
        )


def _mixers(m: Microbatch) -> Iterator[Saved]:
    config, t = m.config, m.own
    n = config.hc_mult
    yield Saved("streams into both mixers", 2 * m.streams)
    yield Saved("mixer logits and weights", 2 * 2 * t * (2 + n) * n * _F32)
    yield Saved("collapsed streams", 2 * t * config.hidden_size * _BF16)
    yield Saved("norms of collapsed streams", 2 * t * config.hidden_size * _BF16, for_weight=True)
    if m.implementation == "primus":
        yield Saved("float32 normalised streams", 2 * t * n * config.hidden_size * _F32, "mixer_norm")
        yield Saved("sinkhorn trajectory", 2 * (2 * config.hc_sinkhorn_iters - 1) * t * n * n * _F32)


def _attention(m: Microbatch) -> Iterator[Saved]:
    config, t, tensor = m.config, m.rows, m.geometry.tensor
    heads = config.num_attention_heads // tensor
    wide = heads * config.head_dim
    fetched = heads * _PADDED if m.implementation == "primus" and config.head_dim == 512 else wide
    yield Saved("query latent", t * config.q_lora_rank * _BF16)
    yield Saved("norm of the query latent", t * config.q_lora_rank * _BF16, for_weight=True)
    yield Saved("queries before and after their norm", t * (wide + fetched) * _BF16, "query")
    yield Saved("key-value latent", 3 * t * config.head_dim * _BF16)
    yield Saved("log-sum-exp", t * heads * _F32, "attention_core")
    yield Saved("attention output", t * wide * _BF16, "attention_core")
    yield Saved("de-rotated attention output", t * wide * _BF16, "attention_core", for_weight=True)
    latent = t * config.o_groups * config.o_lora_rank // tensor * _BF16
    yield Saved("output latent", latent, "output", for_weight=True)
    yield Saved("output", m.own * config.hidden_size * _BF16, "output")


def _keys(m: Microbatch, layer: int) -> Iterator[Saved]:
    """What compressed attention keeps, and which keys each query reads."""
    config, t, kind = m.config, m.rows, m.config.kind(layer)
    ratio, length = config.compress_ratios[layer], m.batch.sequence_length
    most = {"swa": 0, "csa": config.index_topk, "hca": length // ratio if ratio else 0}[kind]
    yield Saved("key table", t * (config.sliding_window + most) * _I32)
    if kind == "swa":
        return
    halves = 2 if kind == "csa" else 1
    yield Saved("values and gates to pool", 2 * t * halves * config.head_dim * _BF16)
    yield Saved("compressed entries", 3 * (t // ratio) * config.head_dim * _BF16)
    if kind == "csa":
        yield Saved("selected entries", t * config.index_topk * _I64)


def _moe(m: Microbatch) -> Iterator[Saved]:
    config, t = m.config, m.own
    d, inner, rows = config.hidden_size, config.moe_intermediate_size, m.own * config.num_experts_per_tok
    yield Saved("router scores", 3 * t * config.n_routed_experts * _F32, moe=True)
    if m.implementation == "primus":
        first = pool_rows(config, m.geometry, t) * 2 * inner * _BF16
        yield Saved("first expert product, worst case", first, for_weight=True, moe=True)
    else:
        yield Saved("dispatched tokens", rows * d * _BF16, for_weight=True, moe=True)
        yield Saved("first expert product", rows * 2 * inner * _BF16, moe=True)
        yield Saved("expert activation", rows * inner * _BF16, "expert_activation", for_weight=True, moe=True)
    yield Saved("routed output", t * d * _BF16, moe=True)
    shared = m.rows * (inner // m.geometry.tensor) * _BF16
    yield Saved("first product of the shared expert", 2 * shared, "shared_expert", moe=True)
    yield Saved("activation of the shared expert", shared, "shared_expert", for_weight=True, moe=True)
    yield Saved("output of the shared expert", t * d * _BF16, "shared_expert", moe=True)


def layer_gradients(m: Microbatch, layer: int) -> Iterator[Saved]:
    """Gradients of the outputs of products, which the weight gradients of one layer read if they are put off.

    Those of mixers, norms and gate are small and made at once; the indexer is left out, as it is of what is kept.
    `primus` computes the activation of its experts again for them, and fetches what was dispatched.
    """
    config, t, own, kind = m.config, m.rows, m.own, m.config.kind(layer)
    d, inner, tensor = config.hidden_size, config.moe_intermediate_size, m.geometry.tensor
    heads = config.num_attention_heads // tensor
    halves = {"swa": 0, "csa": 2, "hca": 1}[kind]
    yield Saved("gradient of the query latent", t * config.q_lora_rank * _BF16)
    yield Saved("gradient of the queries", t * heads * config.head_dim * _BF16)
    yield Saved("gradient of the key-value latent", t * config.head_dim * _BF16)
    yield Saved("gradient of values and gates", 2 * t * halves * config.head_dim * _BF16)
    yield Saved("gradient of the output latent", t * config.o_groups * config.o_lora_rank // tensor * _BF16)
    yield Saved("gradient of the output", own * d * _BF16)
    if m.implementation == "primus":
        rows = pool_rows(config, m.geometry, own)
    else:
        rows = own * config.num_experts_per_tok
        yield Saved("gradient of dispatched outputs", rows * d * _BF16)
    yield Saved("gradient of the first expert product", rows * 2 * inner * _BF16)
    yield Saved("gradient of the experts' output", own * d * _BF16)
    yield Saved("gradient of the first shared product", t * 2 * (inner // tensor) * _BF16)


def end_gradients(m: Microbatch) -> Iterator[Saved]:
    """What the weight gradient of an output head reads if it is put off; that of the projection of an MTP block, two
    inputs and a gradient, is within it."""
    d = m.config.hidden_size
    yield Saved("input of the head", m.own * d * _BF16)
    yield Saved("gradient of the logits", m.rows * (m.config.vocab_size // m.geometry.tensor) * _BF16)


def layer_saved(m: Microbatch, layer: int) -> tuple[Saved, ...]:
    """What one layer keeps if it is not recomputed; the MTP block is layer `num_hidden_layers`, without its head.

    Raises `ConfigError` for the reference under tensor parallelism, which its operators have not.
    """
    if m.implementation != "reference":
        if m.implementation == "primus":
            check_pool(m.config, m.geometry)
        return (*_mixers(m), *_attention(m), *_keys(m, layer), *_moe(m))
    if m.geometry.tensor != 1:
        raise ConfigError(
            f"implementation reference has no tensor parallelism, tensor is {m.geometry.tensor}; take tensor 1 or "
            "implementation tight"
        )
    p = m.pass_ if layer < m.config.num_hidden_layers else m.pass_.without_last()
    return tuple(_of_reference(term) for term in layer_terms(p, layer, m.objective))


def _of_reference(term: Term) -> Saved:
    own = next(iter(term.freed_by - {"moe"}), None)
    return Saved(f"{term.module}: {term.name}", term.bytes, own, moe="moe" in term.freed_by)
