"""Training on a GPU: the objective is that of the CPU, steps recompute, skip, save and resume there."""

import numpy as np
import pytest
import torch

from tests.model.small import small_config, stirred
from undertow.checkpoint.training import load_checkpoint, save_checkpoint
from undertow.config.training import IndexerConfig, TrainConfig
from undertow.data.packing import Batch, Cursor, Packer
from undertow.data.store import TokenStore
from undertow.model.build import build_model
from undertow.model.context import Indexing
from undertow.model.modules import MODULES, WITHIN_MOE
from undertow.ops import Ops
from undertow.optim.build import build_optimizer
from undertow.train.batches import flat_batch
from undertow.train.loop import Trainer
from undertow.train.objective import Weights, objective

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CONFIG = small_config()
PARTS = tuple((layer, module) for layer in (0, 1, 2) for module in MODULES if module not in WITHIN_MOE)
ALL = Weights(mtp=0.3, balance=0.05, z=0.01, indexer=0.5)


def store(seed: int = 0) -> TokenStore:
    generator = np.random.default_rng(seed)
    return TokenStore.of(generator.integers(0, CONFIG.vocab_size, n) for n in (33, 2, 160, 1, 97, 64))


def packed(rows: int = 3, length: int = 100) -> Batch:
    return next(Packer(store(), rows, length))


def trainer(progress=None, dtype=torch.float32, recompute=(), **settings) -> Trainer:
    chosen = TrainConfig(**(dict(steps=8, batch_size=4, sequence_length=64, warmup_steps=1) | settings))
    model = build_model(CONFIG, seed=1, dtype=dtype, device=DEVICE)
    packer = Packer(store(), 4, 64, 0, Cursor.from_dict(progress.cursor) if progress else None)
    return Trainer(model, build_optimizer(model, chosen), packer, chosen, IndexerConfig(), progress, recompute)


@pytest.mark.parametrize("dense", [False, True])
def test_every_loss_and_gradient_equals_the_cpu_in_float64(dense):
    told = []
    for device in ("cpu", DEVICE):
        model = stirred(CONFIG).double().to(device)
        losses = objective(model, flat_batch(packed(), device), ALL, indexing=Indexing(dense=dense))
        losses.total.backward()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        told.append((losses, gradients))
    (here, ours), (there, theirs) = told
    # Rotary tables are float32 by definition; cos and sin differ in the last bit between the two.
    for name, part in here.parts.items():
        assert float(there.parts[name]) == pytest.approx(float(part), rel=1e-5), name
    assert torch.equal(here.counts, there.counts.cpu()) and ours.keys() == theirs.keys()
    total = torch.stack([g.norm() for g in ours.values()]).norm()
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() <= 1e-4 * gradient.norm() + 1e-7 * total, name


def test_recomputation_gives_the_same_gradients():
    told = []
    for recompute in ((), (0, 1, 2), PARTS):
        model = stirred(CONFIG).to(DEVICE)
        losses = objective(model, flat_batch(packed(), DEVICE), ALL, recompute=recompute)
        losses.total.backward()
        told.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, *others = told
    total = torch.stack([g.norm() for g in plain.values()]).norm()
    for again in others:
        for name, gradient in plain.items():  # sums by atomic additions come in any order
            assert (gradient - again[name]).norm() <= 1e-5 * total, name


def test_modules_give_the_same_gradients_in_kernels():
    """In bfloat16, with heads that the kernels serve: each module by itself, then together."""
    heads = {"num_attention_heads": 8, "head_dim": 64, "index_n_heads": 16, "index_head_dim": 16}
    model, batch = stirred(small_config(**heads), dtype=torch.bfloat16, ops=Ops(device=DEVICE)).to(DEVICE), packed()
    told = []
    for recompute in ((), *([(layer, module) for layer in (0, 1, 2)] for module in MODULES), PARTS):
        model.zero_grad()
        objective(model, flat_batch(batch, DEVICE), ALL, recompute=recompute).total.backward()
        told.append({name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})
    total = torch.stack([g.norm() for g in told[0].values()]).norm()
    for again in told[1:]:
        for name, gradient in told[0].items():
            assert (gradient - again[name]).norm() <= 1e-3 * total, name


@pytest.mark.parametrize("profile", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_bfloat16_steps_learn_on_either_state(profile, optimizer):
    steps = trainer(dtype=torch.bfloat16, state_profile=profile, optimizer=optimizer, micro_batch_size=3)
    losses = [steps.step()["train/lm_loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    wanted = torch.float32 if profile == "fp32" else torch.bfloat16
    assert steps.model.layers[1].attn.wkv.weight.grad.dtype == wanted


def test_a_skipped_step_changes_nothing():
    steps = trainer()
    steps.model.layers[1].attn.wo_a.weight.register_hook(
        lambda gradient: gradient * (float("nan") if steps.progress.step == 1 else 1.0)
    )
    steps.step()
    before = {name: tensor.clone() for name, tensor in steps.model.state_dict().items()}
    entry = steps.step()
    assert entry["train/skipped_for"] == "layers.1.attn.wo_a.weight (its gradient)"
    assert all(torch.equal(tensor, before[name]) for name, tensor in steps.model.state_dict().items())
    assert steps.step()["train/grad_norm"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_follows_the_uninterrupted_one(dtype, tmp_path):
    profile = "bf16" if dtype == torch.bfloat16 else "fp32"
    straight = trainer(dtype=dtype, state_profile=profile)
    for _ in range(3):
        straight.step()
    path = save_checkpoint(tmp_path, straight.model, straight.optimizer, straight.progress)
    wanted = [straight.step()["train/loss"] for _ in range(3)]
    fresh = trainer(dtype=dtype, state_profile=profile)
    progress = load_checkpoint(path, fresh.model, fresh.optimizer)
    resumed = trainer(progress, dtype=dtype, state_profile=profile)
    load_checkpoint(path, resumed.model, resumed.optimizer)
    found = [resumed.step()["train/loss"] for _ in range(3)]
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found == pytest.approx(wanted, rel=1e-3 if dtype == torch.float32 else 2e-2)
