"""Which parameters Muon updates and which AdamW (model card 8.3), and where a stored tensor is several matrices."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from undertow.config.model import ModelConfig
from undertow.model.transformer import Transformer


class Entry(NamedTuple):
    """A parameter with its name. `heights` are the rows, along dimension -2, of each matrix that Muon is to treat by
    itself; empty for AdamW."""

    name: str
    parameter: nn.Parameter
    heights: tuple[int, ...] = ()


class Groups(NamedTuple):
    """Every parameter of a model, once."""

    muon: list[Entry]
    adamw: list[Entry]


def split(model: Transformer, split_heads: bool = False) -> Groups:
    """AdamW for tables, norms, biases, gains, sinks and positional gates; Muon for every other matrix.

    The paper leaves open sinks, `ape` and the head collapse: the first two, added to logits, go with the biases;
    `hc_head.fn` is a matrix like the other hyper-connections'. `split_heads` gives Muon each head of the query
    up-projections by itself; the paper writes them as one matrix.
    """
    groups = Groups([], [])
    for name, parameter in model.named_parameters():
        if _is_adamw(name):
            groups.adamw.append(Entry(name, parameter))
            continue
        if parameter.dim() not in (2, 3):
            raise ValueError(f"{name} {list(parameter.shape)}: no matrix; say in undertow.optim.groups who updates it")
        groups.muon.append(Entry(name, parameter, _heights(name, parameter, model.config, split_heads)))
    return groups


def everything(model: Transformer) -> Groups:
    """AdamW for all."""
    return Groups([], [Entry(name, parameter) for name, parameter in model.named_parameters()])


def _is_adamw(name: str) -> bool:
    if name in ("embed.weight", "head.weight"):
        return True
    return name.endswith("norm.weight") or name.rpartition(".")[2] in ("base", "scale", "attn_sink", "ape")


def _heights(name: str, parameter: nn.Parameter, config: ModelConfig, split_heads: bool) -> tuple[int, ...]:
    """Heights of the matrices that the paper writes separately and the checkpoint stores as one tensor."""
    rows = parameter.shape[-2]
    if name.endswith(("hc_attn.fn", "hc_ffn.fn")):
        n = config.hc_mult
        return n, n, n * n  # pre, post, mix
    height = rows
    if name.endswith("experts.w13"):
        height = config.moe_intermediate_size  # gate, up
    elif name.endswith("attn.wo_a.weight"):
        height = config.o_lora_rank  # one matrix a group of heads
    elif name.endswith(("compressor.wkv.weight", "compressor.wgate.weight")):
        height = _width(name, config)  # overlapping windows: the overlap series, the own series
    elif split_heads and name.endswith("wq_b.weight"):
        height = _width(name, config)
    return (height,) * (rows // height)


def _width(name: str, config: ModelConfig) -> int:
    return config.index_head_dim if ".indexer." in name else config.head_dim
