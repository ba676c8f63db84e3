"""The model on a GPU: the reference operators give there what they give on the CPU, in every way of calling."""

import pytest
import torch

from tests.model.oracle import randomise
from undertow.config.model import ModelConfig
from undertow.engine.llm import LLM
from undertow.engine.sampling import SamplingParams
from undertow.model.build import build_model
from undertow.ops.segments import Segments

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LENGTH = 301


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_preset("v4-debug")


@pytest.fixture(scope="module")
def ids(config) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def model_on(config, device, dtype):
    model = build_model(config, dtype=dtype)
    randomise(model, 3)
    return model.to(device)


def loss_and_gradients(model, ids):
    out = model(ids.to(model.head.weight.device), return_mtp=True)
    loss = out.logits.logsumexp(-1).mean() + out.mtp_logits.square().mean()
    loss.backward()
    return out, {name: p.grad.cpu().double() for name, p in model.named_parameters() if p.grad is not None}


def test_float64_forward_and_backward_equal_the_cpu(config, ids):
    """In float64 no router or indexer decision hangs on rounding, so every gradient can be compared."""
    here, gradients_here = loss_and_gradients(model_on(config, "cpu", torch.float32).double(), ids)
    there, gradients_there = loss_and_gradients(model_on(config, DEVICE, torch.float32).double(), ids)
    # Rotary tables are float32 by definition; cos and sin differ in the last bit between the two.
    assert (here.logits - there.logits.cpu()).norm() <= 1e-5 * here.logits.norm()
    assert (here.mtp_logits - there.mtp_logits.cpu()).norm() <= 1e-5 * here.mtp_logits.norm()
    total = torch.stack([g.norm() for g in gradients_here.values()]).norm()
    assert gradients_here.keys() == gradients_there.keys()
    for name, gradient in gradients_here.items():
        assert (gradient - gradients_there[name]).norm() <= 1e-4 * gradient.norm() + 1e-7 * total, name


@pytest.mark.parametrize("chunk", [1, 5, 128])
def test_chunks_equal_the_whole(config, ids, chunk):
    model = model_on(config, DEVICE, torch.float32).double()
    ids = ids.to(DEVICE)
    with torch.no_grad():
        whole, cache = model(ids), model.new_cache(2)
        parts = [model(ids[:, start : start + chunk], cache=cache) for start in range(0, LENGTH, chunk)]
    assert (torch.cat(parts, 1) - whole).norm() <= 1e-9 * whole.norm()


def test_packed_and_padded_equal_separate(config, ids):
    model = model_on(config, DEVICE, torch.float32).double()
    ids = ids.to(DEVICE)
    segment_ids = (torch.arange(LENGTH, device=DEVICE) >= 100).long().expand(2, -1)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    with torch.no_grad():
        separate = torch.cat([model(ids[:, :100]), model(ids[:, 100:])], 1)
        assert (model(ids, segment_ids=segment_ids) - separate).norm() <= 1e-9 * separate.norm()
        alone = model(ids[:1, 37:])
        assert (model(ids, attention_mask=mask)[:1, 37:] - alone).norm() <= 1e-9 * alone.norm()


def test_bfloat16_gradients_are_finite_and_near_float32(config, ids):
    _, exact = loss_and_gradients(model_on(config, DEVICE, torch.float32), ids)
    model = model_on(config, DEVICE, torch.bfloat16)
    _, rounded = loss_and_gradients(model, ids)
    assert all(torch.isfinite(g).all() for g in rounded.values())
    for name in ("head.weight", "norm.weight"):
        assert (rounded[name] - exact[name]).norm() <= 0.1 * exact[name].norm(), name


def test_small_preset_trains_in_bfloat16():
    """One document longer than the selection limit, forward and backward, every trained parameter with a gradient."""
    config = ModelConfig.from_preset("v4-small")
    model = build_model(config, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.randint(0, config.vocab_size, (2048,), device=DEVICE)
    segments = Segments.from_lengths([1500, 548], device=DEVICE)
    hidden = model.collapse(model.trunk(ids, segments).streams)
    loss = model.ops.linear_cross_entropy(hidden[:-1], model.head.weight, ids[1:])[0].mean()
    loss.backward()
    assert abs(loss.item() - torch.log(torch.tensor(float(config.vocab_size))).item()) < 0.3
    for name, parameter in model.named_parameters():
        if "indexer" in name or name.startswith("mtp."):
            continue
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_generation_equals_the_cpu(config):
    prompts = [[5, 9, 200, 3], [17] * 50]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    here = LLM(model_on(config, "cpu", torch.float32).double()).generate(prompts, params)
    there = LLM(model_on(config, DEVICE, torch.float32).double()).generate(prompts, params)
    assert [c.token_ids for c in here] == [c.token_ids for c in there]
