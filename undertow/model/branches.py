"""Which parts of the architecture a configuration really uses at a given length."""

from __future__ import annotations

from undertow.config.model import ModelConfig


def active_branches(config: ModelConfig, length: int) -> dict[str, bool]:
    """Whether each branch of the model takes part in one document of `length` tokens.

    `window evicts`: some key is out of reach of a later query. `csa overlaps`: an entry reads the group before its own.
    `selection`: a query sees more entries than `index_topk` (model card 4.1). A run in which a branch never fires says
    nothing about that branch.
    """
    layers = range(config.num_hidden_layers)
    kinds = {config.kind(layer) for layer in layers}
    blocks = kinds | ({"swa"} if config.num_nextn_predict_layers else set())
    csa_entries = length // config.csa_ratio if "csa" in kinds else 0
    hca = [config.compress_ratios[layer] for layer in layers if config.kind(layer) == "hca"]
    return {
        "sliding-window layer": "swa" in blocks,
        "window evicts": length > config.sliding_window,
        "csa entries": csa_entries >= 1,
        "csa overlaps": csa_entries >= 2,
        "selection": csa_entries > config.index_topk,
        "hca entries": any(length >= ratio for ratio in hca),
        "hash routing": config.num_hash_layers > 0,
        "learned routing": config.num_hash_layers < config.num_hidden_layers,
        "mtp": config.num_nextn_predict_layers > 0 and length > 1,
    }
