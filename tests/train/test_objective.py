"""The objective against cross-entropy on whole logits, and its independence of how a batch is divided."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.model.small import small_config, stirred
from undertow.data.packing import Batch, Packer
from undertow.train.batches import flat_batch
from undertow.train.objective import objective, summed_loss

CONFIG = small_config()


def packed(rows: int = 3, length: int = 40, seed: int = 0) -> Batch:
    generator = np.random.default_rng(seed)
    documents = [generator.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in (33, 2, 60, 1, 17)]
    return next(Packer(documents, rows, length, seed))


def naive(model, batch: Batch, mtp_weight: float) -> torch.Tensor:
    ids, segments, labels = (torch.from_numpy(np.asarray(x)) for x in (batch.ids, batch.segment_ids, batch.labels))
    out = model(ids, segment_ids=segments, return_mtp=True)
    after_next = torch.full_like(labels, -100)
    inside = segments[:, :-2] == segments[:, 2:]
    after_next[:, :-2][inside] = ids[:, 2:][inside]
    lm = cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    return lm + mtp_weight * cross_entropy(out.mtp_logits.flatten(0, 1), after_next.flatten())


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_equals_cross_entropy_on_whole_logits_with_gradients():
    batch = packed()
    ours, theirs = stirred(CONFIG), stirred(CONFIG)
    losses = objective(ours, flat_batch(batch), 0.3)
    losses.total.backward()
    wanted = naive(theirs, batch, 0.3)
    wanted.backward()
    assert losses.mtp is not None
    torch.testing.assert_close(losses.total, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses.total, losses.lm + 0.3 * losses.mtp)
    assert gradients(ours).keys() == gradients(theirs).keys()
    for name, gradient in gradients(theirs).items():
        distance = torch.linalg.vector_norm(gradients(ours)[name] - gradient)
        assert distance <= 2e-5 * torch.linalg.vector_norm(gradient) + 1e-7, name


@pytest.mark.parametrize("changes", [{"num_nextn_predict_layers": 0, "compress_ratios": (0, 4, 8)}, {}])
def test_without_mtp_block_or_weight_there_is_no_such_part(changes):
    model = stirred(small_config(**changes))
    losses = objective(model, flat_batch(packed()), 0.3 if changes else 0.0)
    assert losses.mtp is None
    assert torch.equal(losses.total, losses.lm)


def test_parts_sum_to_the_whole():
    model = stirred(CONFIG)
    batch = packed()
    whole = flat_batch(batch)
    parts = [flat_batch(Batch(batch.ids[r], batch.segment_ids[r], batch.labels[r])) for r in (slice(0, 1), slice(1, 3))]
    told = [objective(model, part, 0.3, whole.counts) for part in parts]
    wanted = objective(model, whole, 0.3)
    assert parts[0].counts[0] != parts[1].counts[0]
    torch.testing.assert_close(sum(t.total for t in told), wanted.total, rtol=1e-6, atol=0)


def test_summed_loss_is_that_of_the_objective():
    model, flat = stirred(CONFIG), flat_batch(packed())
    wanted = objective(model, flat, 0.0).lm.item() * flat.counts[0]
    assert summed_loss(model, flat) == pytest.approx(wanted, rel=1e-6)


def test_every_layer_tells_its_routes():
    routes = objective(stirred(CONFIG), flat_batch(packed()), 0.3).routes
    assert [tuple(route.indices.shape) for route in routes] == [(120, CONFIG.num_experts_per_tok)] * 3
