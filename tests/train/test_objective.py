"""The objective against losses on whole logits, and its independence of how a batch is divided."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.engine.bytelevel import tokenizer
from tests.model.small import small_config, stirred
from undertow.data.packing import Batch, Packer
from undertow.data.store import TokenStore
from undertow.train.balance import balance_loss
from undertow.train.batches import Denominators, flat_batch, micro_batches
from undertow.train.evaluation import evaluate
from undertow.train.objective import Losses, Weights, objective

CONFIG = small_config()
ALL = Weights(mtp=0.3, balance=0.05, z=0.01, indexer=0.5)


def packed(rows: int = 3, length: int = 40, seed: int = 0) -> Batch:
    generator = np.random.default_rng(seed)
    documents = [generator.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in (33, 2, 60, 1, 17)]
    return next(Packer(TokenStore.of(documents), rows, length, seed))


def naive(model, batch: Batch, weights: Weights) -> torch.Tensor:
    ids, segments, labels = (torch.from_numpy(np.asarray(x)) for x in (batch.ids, batch.segment_ids, batch.labels))
    out = model(ids, segment_ids=segments, return_mtp=True)
    after_next = torch.full_like(labels, -100)
    inside = segments[:, :-2] == segments[:, 2:]
    after_next[:, :-2][inside] = ids[:, 2:][inside]
    lm = cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    z = out.logits.logsumexp(-1)[labels != -100].square().mean()
    mtp = cross_entropy(out.mtp_logits.flatten(0, 1), after_next.flatten())
    return lm + weights.mtp * mtp + weights.z * z


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_parts(model, batch: Batch, rows: int | None, weights: Weights = ALL) -> list[Losses]:
    parts = [flat_batch(part) for part in micro_batches(batch, rows)]
    of = Denominators.of(parts)
    every = [objective(model, part, weights, of) for part in parts]
    for losses in every:
        losses.total.backward()
    return every


def test_equals_losses_on_whole_logits_with_gradients():
    batch, weights = packed(), Weights(mtp=0.3, z=0.01)
    ours, theirs = stirred(CONFIG), stirred(CONFIG)
    losses = objective(ours, flat_batch(batch), weights)
    losses.total.backward()
    wanted = naive(theirs, batch, weights)
    wanted.backward()
    torch.testing.assert_close(losses.total, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        losses.total, losses.parts["lm"] + 0.3 * losses.parts["mtp"] + 0.01 * losses.parts["z"], rtol=1e-6, atol=0
    )
    assert gradients(ours).keys() == gradients(theirs).keys()
    for name, gradient in gradients(theirs).items():
        distance = torch.linalg.vector_norm(gradients(ours)[name] - gradient)
        assert distance <= 2e-5 * torch.linalg.vector_norm(gradient) + 1e-7, name


def test_balance_is_that_of_every_learned_router_the_mtp_blocks_too():
    model, flat = stirred(CONFIG), flat_batch(packed())
    losses = objective(model, flat, Weights(mtp=0.3, balance=2.0))
    trunk = model.trunk(flat.ids, flat.segments)
    drafted = model.mtp_hidden(trunk.streams, flat.ids, flat.segments)
    each = [balance_loss(route, flat.sequence, 3) / 3 for route in trunk.routes[1:]]  # the first layer is hashed
    each.append(balance_loss(drafted.routing, flat.sequence[drafted.rows], 3) / 3)
    plain = objective(model, flat, Weights(mtp=0.3)).total
    torch.testing.assert_close(losses.parts["balance"], torch.stack(each).mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(losses.total - plain, 2.0 * torch.stack(each).sum(), rtol=1e-5, atol=0)


def test_the_balance_loss_alone_reaches_the_router():
    model, flat = stirred(CONFIG), flat_batch(packed())
    weight = model.layers[1].ffn.gate.weight
    found = [
        torch.autograd.grad(objective(model, flat, Weights(balance=factor)).total, weight)[0] for factor in (0.0, 1.0)
    ]
    assert float((found[1] - found[0]).norm()) > 1e-4 * float(found[0].norm())


def test_indexer_loss_is_the_mean_over_tokens_of_all_csa_layers():
    model, flat = stirred(CONFIG), flat_batch(packed())
    losses = objective(model, flat, Weights(indexer=0.5))
    wanted = objective(model, flat, Weights())
    torch.testing.assert_close(losses.total, wanted.total + 0.5 * losses.parts["indexer"], rtol=1e-6, atol=0)
    assert float(losses.parts["indexer"]) > 0
    losses.total.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".indexer." in name)


@pytest.mark.parametrize("changes", [{"num_nextn_predict_layers": 0, "compress_ratios": (0, 4, 8)}, {}])
def test_without_mtp_block_or_weight_there_is_no_such_part(changes):
    model = stirred(small_config(**changes))
    losses = objective(model, flat_batch(packed()), Weights(mtp=0.3 if changes else 0.0))
    assert losses.parts.keys() == {"lm"} and torch.equal(losses.total, losses.parts["lm"])
    assert losses.counts.shape == (3, CONFIG.n_routed_experts)


def test_counts_are_of_all_layers_and_the_mtp_block():
    flat = flat_batch(packed())
    counts = objective(stirred(CONFIG), flat, ALL).counts
    assert counts.sum(1).tolist() == [120 * 2] * 3 + [len(flat.mtp_labels) * 2]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_loss_and_gradients_do_not_depend_on_micro_batches(rows):
    """Documents of many lengths: rows, labels, MTP labels and entries of the parts all differ; 4 divides 6 raggedly."""
    batch = packed(rows=6)
    whole, parted = stirred(CONFIG), stirred(CONFIG)
    (wanted,) = by_parts(whole, batch, None)
    found = by_parts(parted, batch, rows)
    assert len(found) == -(-6 // rows)
    total = sum(float(losses.total.detach().double()) for losses in found)
    assert total == pytest.approx(wanted.total.item(), rel=1e-6)
    for name, part in wanted.parts.items():
        assert sum(losses.parts[name].item() for losses in found) == pytest.approx(part.item(), rel=1e-6), name
    assert torch.equal(torch.stack([losses.counts for losses in found]).sum(0), wanted.counts)
    ours, theirs = gradients(parted), gradients(whole)
    assert ours.keys() == theirs.keys()
    apart = torch.stack([(ours[name] - theirs[name]).double().norm() for name in theirs]).norm()
    norm = torch.stack([theirs[name].double().norm() for name in theirs]).norm()
    assert float(apart / norm) < 1e-6


def test_the_held_out_loss_is_that_of_the_objective():
    model, batch = stirred(CONFIG), packed()
    flat = flat_batch(batch)
    found = evaluate(model, [batch], tokenizer(), "cpu")
    assert found.labels == flat.counts.lm
    assert found.nats == pytest.approx(objective(model, flat, Weights()).total.item() * flat.counts.lm, rel=1e-6)
