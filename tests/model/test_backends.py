"""Which operator each layer attends with: those whose indexer chooses entries have one of their own."""

from __future__ import annotations

import torch

from tests.model.small import LENGTH, small_config, stirred, tokens
from undertow.ops.registry import REFERENCE


@torch.no_grad()
def test_layers_attend_by_their_kind(monkeypatch):
    ratios: dict[str, list[int]] = {"sparse_attention": [], "csa_attention": []}
    real = REFERENCE["sparse_attention"]
    for name, seen in ratios.items():

        def watch(*given, seen=seen, **named):
            seen.append(named["ratio"])
            return real(*given, **named)

        monkeypatch.setitem(REFERENCE, name, watch)
    model = stirred(small_config())
    model(tokens(model.config, 1, LENGTH))
    assert [layer.attn.kind for layer in model.layers] == ["swa", "csa", "hca"]
    assert ratios["csa_attention"] == [4] and ratios["sparse_attention"] == [0, 8]
