"""A fresh model (model card 8.5): normal weights, unit norms, zero gates and sinks, a balanced hash table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from undertow.config.model import ModelConfig
from undertow.model.transformer import Transformer
from undertow.ops import Ops


def hash_table(vocabulary: int, experts: int, k: int, generator: torch.Generator) -> Tensor:
    """`k` distinct experts for every token id, `[V, k]` int64, each expert used equally often to within `V k / E`
    rounding.

    Row `v` takes `k` consecutive entries of a random permutation of the experts, a new permutation whenever one is
    used up, starting the row over on the new one if fewer than `k` are left.
    """
    rows_each = experts // k
    permutations = torch.rand(-(-vocabulary // rows_each), experts, generator=generator, dtype=torch.float32).argsort(
        -1
    )
    return permutations[:, : rows_each * k].reshape(-1, k)[:vocabulary].contiguous()


def fresh_values(model: Transformer, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of a fresh model by name, one whole tensor at a time, in float32 or int64 on the CPU.

    `model` gives names and shapes alone and may be on the meta device; the values do not depend on its type.
    """
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if name.endswith("norm.weight") or leaf == "scale":
            yield name, torch.ones(parameter.shape, dtype=torch.float32)
        elif leaf in ("base", "ape", "attn_sink"):
            yield name, torch.zeros(parameter.shape, dtype=torch.float32)
        else:
            values = torch.empty(parameter.shape, dtype=torch.float32)
            yield name, values.normal_(0.0, config.initializer_range, generator=generator)
            del values  # before the next one is made
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            yield name, hash_table(config.vocab_size, config.n_routed_experts, config.num_experts_per_tok, generator)
        else:
            yield name, torch.zeros(buffer.shape, dtype=torch.float32)


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill every parameter and buffer of `model` from `seed`; the values do not depend on device or type."""
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    for name, values in fresh_values(model, seed):
        tensors[name].copy_(values)
        del values


def build_model(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
) -> Transformer:
    """A freshly initialised model. `dtype` is that of the matrices; hyper-connections, sinks, positional gates and
    router biases stay float32."""
    model = Transformer(config, ops=ops, device=device, dtype=dtype)
    initialise(model, seed)
    return model
