"""Bytes of the cache that serving keeps, per token of context and per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.presets import nearest

CacheFormat = Literal["fp8", "fp8-fp4", "bf16"]
"""`fp8`: FP8 values with bf16 rotary part, FP8 indexer keys; `fp8-fp4`: the same with FP4 indexer keys; `bf16`: all."""

_F32, _BF16 = 4, 2
_GROUP = 64  # values of a record that share a scale
_FP4_GROUP = 32
_PAD = 8  # a record ends on a multiple of so many bytes


def cache_format_of(name: str) -> CacheFormat:
    """The format of that name. Raises `ConfigError` with the nearest one."""
    known = get_args(CacheFormat)
    if name not in known:
        raise ConfigError(f"unknown cache format '{name}'{nearest(name, list(known))} (formats: {', '.join(known)})")
    return name  # type: ignore[return-value]


def record_bytes(config: ModelConfig, form: CacheFormat) -> int:
    """One key-value latent: of the window or a compressed entry. In FP8 values, rotary part, one scale a group, pad."""
    if form == "bf16":
        return config.head_dim * _BF16
    plain = config.head_dim - config.qk_rope_head_dim
    size = plain + config.qk_rope_head_dim * _BF16 + -(-plain // _GROUP)
    return -(-size // _PAD) * _PAD


def key_bytes(config: ModelConfig, form: CacheFormat) -> int:
    """One indexer key: FP8 with a float32 scale, FP4 with one-byte scales of 32 values, or bf16."""
    width = config.index_head_dim
    return {"fp8": width + _F32, "fp8-fp4": width // 2 + -(-width // _FP4_GROUP), "bf16": width * _BF16}[form]


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of one sequence: a record of the window for every layer, states of open groups, and compressed entries."""

    config: ModelConfig
    form: CacheFormat = "fp8"
    online: bool = False
    """Whether open HCA groups are kept as a running softmax instead of as rows."""
    mtp: bool = False
    """Whether the MTP block drafts, and so has a window too."""

    @property
    def _layers(self) -> range:
        blocks = self.config.num_nextn_predict_layers if self.mtp else 0
        return range(self.config.num_hidden_layers + blocks)

    @property
    def per_token(self) -> float:
        """Bytes that each further token of context adds, on average."""
        return sum(self._entry(layer) / self.config.compress_ratios[layer] for layer in self._compressed)

    @property
    def window(self) -> int:
        """Bytes of the sliding windows."""
        return len(self._layers) * self.config.sliding_window * record_bytes(self.config, self.form)

    @property
    def csa_state(self) -> int:
        """Values and gates, in float32, of the open group and the one before it, of every CSA layer."""
        return self._count("csa") * 2 * 2 * self.config.csa_ratio * 2 * self.config.head_dim * _F32

    @property
    def indexer_state(self) -> int:
        """The same of every indexer."""
        return self._count("csa") * 2 * 2 * self.config.csa_ratio * 2 * self.config.index_head_dim * _F32

    @property
    def hca_state(self) -> int:
        """Values and gates of every HCA layer's open group, or (`online`) largest gate, weight and weighted sum."""
        rows = [3 if self.online else 2 * self.config.compress_ratios[layer] for layer in self._compressed]
        kinds = [self.config.kind(layer) for layer in self._compressed]
        rows = [n for n, kind in zip(rows, kinds, strict=True) if kind == "hca"]
        return sum(rows) * self.config.head_dim * _F32

    @property
    def fixed(self) -> int:
        """Bytes that a sequence has however short it is."""
        return self.window + self.csa_state + self.indexer_state + self.hca_state

    def of_length(self, tokens: int) -> int:
        """Bytes of a sequence of so many tokens."""
        entries = sum(self._entry(layer) * (tokens // self.config.compress_ratios[layer]) for layer in self._compressed)
        return self.fixed + entries

    @property
    def _compressed(self) -> list[int]:
        return [layer for layer in self._layers if self.config.compress_ratios[layer]]

    def _count(self, kind: str) -> int:
        return sum(self.config.kind(layer) == kind for layer in self._layers)

    def _entry(self, layer: int) -> int:
        selected = key_bytes(self.config, self.form) if self.config.kind(layer) == "csa" else 0
        return record_bytes(self.config, self.form) + selected
