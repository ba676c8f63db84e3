"""A fresh model (model card 8.5): normal weights, unit norms, zero gates and sinks, a balanced hash table."""

from __future__ import annotations

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


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill every parameter and buffer of `model` from `seed`; the values do not depend on device or type."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if name.endswith("norm.weight") or leaf == "scale":
            parameter.fill_(1.0)
        elif leaf in ("base", "ape", "attn_sink"):
            parameter.zero_()
        else:
            values = torch.empty(parameter.shape, dtype=torch.float32).normal_(
                0.0, config.initializer_range, generator=generator
            )
            parameter.copy_(values)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(hash_table(config.vocab_size, config.n_routed_experts, config.num_experts_per_tok, generator))
        else:
            buffer.zero_()


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
