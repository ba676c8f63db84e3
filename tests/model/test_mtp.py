"""The MTP block against one assembled from transformers' parts: layer, stream collapse, norm, LM head."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

from tests.model.cases import CHOICE_MARGIN, CLAMP_MARGIN, logit_error
from tests.model.oracle import margins, native_name, ours_config, random_shape, randomise, their_config, worst_gradient
from undertow.model.transformer import Transformer


class Assembled(nn.Module):
    """transformers' model with one more layer, which reads the fusion of model card 7 instead of the layer before it.

    Its final collapse and norm then are the block's own, and its logits the prediction of token `t + 2`.
    """

    def __init__(self, shape: dict):
        super().__init__()
        layers = shape["num_hidden_layers"]
        config = their_config(shape | dict(num_hidden_layers=layers + 1, kinds=[*shape["kinds"], 0]))
        width, eps = config.hidden_size, config.rms_norm_eps
        self.whole = DeepseekV4ForCausalLM(config)
        self.e_proj, self.h_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.enorm, self.hnorm = DeepseekV4RMSNorm(width, eps=eps), DeepseekV4RMSNorm(width, eps=eps)
        self.whole.model.layers[layers].register_forward_pre_hook(self._fuse)
        self._block = f"model.layers.{layers}."

    def _fuse(self, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        embedded = self.whole.model.embed_tokens(self._following)
        return (self.e_proj(self.enorm(embedded)).unsqueeze(2) + self.h_proj(self.hnorm(inputs[0])),)

    def forward(self, ids: Tensor) -> Tensor:
        self._following = ids[:, 1:]
        return self.whole(ids[:, :-1]).logits

    def native(self, name: str) -> str:
        """Our name of a tensor."""
        name = name.removeprefix("whole.")
        own = name.split(".")[0] in ("e_proj", "h_proj", "enorm", "hnorm")
        if own or name.startswith(("model.hc_head.", "model.norm.")):
            return "mtp.0." + native_name(name)
        if name.startswith(self._block):
            return "mtp.0." + native_name("model.layers.0." + name.removeprefix(self._block)).removeprefix("layers.0.")
        return native_name(name)


def both(number: int) -> tuple[Assembled, Transformer, Tensor]:
    """The block's two models with equal random weights clear of ties, and `ids [2, S]`."""
    rng = random.Random(number)
    shape = random_shape(rng)
    length = rng.choice([2, 3, 19, 50, 121])
    ratios = (*ours_config(shape).compress_ratios, 0)
    config = ours_config(shape, num_nextn_predict_layers=1, compress_ratios=ratios)
    ours = Transformer(config)
    for seed in range(100 * number, 100 * number + 20):
        theirs = Assembled(shape)
        randomise(theirs, seed)
        state = {theirs.native(name): tensor.clone() for name, tensor in theirs.state_dict().items()}
        missing = ours.load_state_dict(state, strict=False)
        assert set(missing.missing_keys) == {"norm.weight", *(f"hc_head.{part}" for part in ("fn", "base", "scale"))}
        assert missing.unexpected_keys == []
        randomise(ours.norm, seed)
        randomise(ours.hc_head, seed)
        ids = torch.randint(0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
        choice, clamp = margins(ours, ids)
        if choice >= CHOICE_MARGIN and clamp >= CLAMP_MARGIN:
            return theirs, ours, ids
    raise AssertionError(f"no draw of case {number} stands clear of ties")


@pytest.mark.parametrize("number", range(6))
def test_block_matches_the_assembled_one(number):
    theirs, ours, ids = both(number)
    labels = torch.cat([ids[:, 2:], torch.full((2, 1), -100)], 1)
    wanted = theirs(ids)
    got = ours(ids, return_mtp=True)
    assert logit_error(got.mtp_logits[:, :-1].detach(), wanted.detach()) <= 2e-5
    assert not got.mtp_logits[:, -1].any()
    if ids.shape[1] == 2:
        labels = ids[:, :1]
    F.cross_entropy(wanted.flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(got.mtp_logits[:, :-1].flatten(0, 1), labels.flatten()).backward()
    slopes = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    their_slopes = {theirs.native(n): p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert {"embed.weight", "head.weight", "mtp.0.e_proj.weight", "mtp.0.h_proj.weight"} <= slopes.keys()
    assert worst_gradient(slopes, their_slopes, 1e-7)[0] <= 1e-5


@torch.no_grad()
def test_the_block_reads_the_streams_before_their_collapse():
    """What happens to the streams after the trunk, the final collapse and norm, is nothing to the block."""
    _, ours, ids = both(2)
    before = ours(ids, return_mtp=True).mtp_logits
    ours.hc_head.base.add_(1.0)
    ours.norm.weight.mul_(2.0)
    assert torch.equal(ours(ids, return_mtp=True).mtp_logits, before)
