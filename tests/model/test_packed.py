"""Models that hold matrices as codes compute as ones that hold the numbers, forward alone."""

from __future__ import annotations

import pytest
import torch

from tests.model.small import LENGTH, small_config, stirred, tokens
from undertow.config.errors import InputError
from undertow.model.packed import can_hold, hold, packed_names, refuse_packed
from undertow.model.transformer import Transformer
from undertow.model.weights import all_weights
from undertow.ops import Ops
from undertow.quant.quantise import quantise
from undertow.quant.scheme import MXFP4, WEIGHTS


@torch.no_grad()
def two_models(ops: Ops | None = None) -> tuple[Transformer, Transformer]:
    """The same numbers as parameters and as codes, experts in MXFP4 and the other matrices in FP8."""
    config = small_config(hidden_size=64, moe_intermediate_size=32)
    plain, packed = (stirred(config, ops=ops) for _ in range(2))
    for name, parameter in list(packed.named_parameters()):
        if can_hold(packed, name):
            weight = quantise(parameter, MXFP4 if ".experts." in name else WEIGHTS)
            plain.get_parameter(name).copy_(weight.dequantise())
            hold(packed, name, weight)
    return plain, packed


def test_what_may_be_codes_is_what_the_release_stores_as_codes():
    """But the grouped output projection; and the indexer's head weights, which it stores as numbers, could be too."""
    config = small_config()
    model = stirred(config)
    stored = {weight.name for weight in all_weights(config) if weight.stored in ("fp8", "fp4")}
    held = {name for name, _ in model.named_parameters() if can_hold(model, name)}
    assert {name.split(".", 2)[2] for name in stored - held} == {"attn.wo_a.weight"}
    assert {name.split(".", 2)[2] for name in held - stored} == {"attn.indexer.weights_proj.weight"}


@pytest.mark.parametrize("invariant", [False, True])
@torch.no_grad()
def test_logits_have_the_same_bits(invariant):
    plain, packed = two_models(Ops(batch_invariant=invariant))
    ids = tokens(plain.config, 2, LENGTH)
    want, got = plain(ids, return_mtp=True), packed(ids, return_mtp=True)
    assert torch.equal(got.logits, want.logits) and torch.equal(got.mtp_logits, want.mtp_logits)


def test_codes_are_no_parameters():
    plain, packed = two_models()
    names = packed_names(packed)
    assert set(names) == dict(plain.named_parameters()).keys() - dict(packed.named_parameters()).keys()
    assert "layers.0.ffn.experts.w13" in names and "layers.0.attn.wq_a.weight" in names
    assert not set(names) & set(packed.state_dict())
    assert packed_names(plain) == []


def test_what_needs_numbers_is_refused():
    plain, packed = two_models()
    refuse_packed(plain, "no training")
    names = packed_names(packed)
    with pytest.raises(InputError) as error:
        refuse_packed(packed, "no training")
    assert str(error.value) == (
        f"no training: this model holds {', '.join(names[:3])}, ... as FP8 or FP4 codes, which serve forward alone; "
        "load it without packed=True"
    )
