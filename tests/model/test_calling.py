"""Every way of calling the model gives the same answer: packed, padded, in chunks, in ragged batches, alone or not.

In float32 to 1e-6 by norm; with batch invariance to the bit, in float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.model.cases import CHOICE_MARGIN
from tests.model.oracle import margins
from tests.model.small import LENGTH, small_config, stirred, tokens
from undertow.config.errors import InputError
from undertow.model.transformer import Output, Transformer
from undertow.ops import Ops
from undertow.ops.segments import Segments

Same = Callable[[Tensor, Tensor], None]

# Shorter than a group of 4, exactly one, and past every branch.
DOCUMENTS = (1, 3, LENGTH, 4, 7, 2, 30)


def close(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    assert (got - wanted).norm() <= 1e-6 * wanted.norm()


def equal(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    assert torch.equal(got, wanted)


@pytest.fixture(
    scope="module",
    params=[(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)],
    ids=["float32", "float32 invariant", "bfloat16 invariant"],
)
def called(request) -> tuple[Transformer, Same]:
    dtype, invariant = request.param
    return stirred(small_config(), dtype=dtype, ops=Ops(batch_invariant=invariant)), equal if invariant else close


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def whole(model: Transformer, ids: Tensor) -> Output:
    """Each row of `ids [B, S]` in a call of its own."""
    parts = [model(row[None], return_mtp=True) for row in ids]
    return Output(torch.cat([p.logits for p in parts]), torch.cat([p.mtp_logits for p in parts]))


def test_choices_are_no_ties():
    model = stirred(small_config())
    assert margins(model, tokens(model.config, 2, 140))[0] >= CHOICE_MARGIN / 10
    assert margins(model, tokens(model.config, 32, LENGTH)[13:14])[0] >= CHOICE_MARGIN / 10


@pytest.mark.parametrize("marked", ["segment_ids", "positions", "both"])
def test_packed_documents_are_separate(called, marked):
    model, same = called
    texts = [tokens(model.config, 1, n, seed=n) for n in DOCUMENTS]
    segments = torch.cat([torch.full((1, n), i) for i, n in enumerate(DOCUMENTS)], 1)
    positions = torch.cat([torch.arange(n)[None] for n in DOCUMENTS], 1)
    named = dict(segment_ids=segments, positions=positions)
    out = model(torch.cat(texts, 1), **(named if marked == "both" else {marked: named[marked]}), return_mtp=True)
    parts = [whole(model, text) for text in texts]
    same(out.logits, torch.cat([p.logits for p in parts], 1))
    same(out.mtp_logits, torch.cat([p.mtp_logits for p in parts], 1))


def test_padding_anywhere_changes_nothing(called):
    model, same = called
    ids = tokens(model.config, 1, LENGTH)
    width = LENGTH + 11
    mask = torch.zeros(5, width, dtype=torch.int64)
    mask[0, 11:] = 1  # left
    mask[1, :LENGTH] = 1  # right
    mask[2, 5:-6] = 1  # both
    holes = torch.randperm(width, generator=torch.Generator().manual_seed(1))[:LENGTH].sort().values
    mask[3, holes] = 1  # in the middle; row 4 is empty
    padded = torch.full((5, width), -1)
    padded[:4][mask[:4].bool()] = ids.repeat(4, 1).flatten()
    out = model(padded, attention_mask=mask, return_mtp=True)
    wanted = model(ids, return_mtp=True)
    for row in range(4):
        same(out.logits[row, mask[row].bool()], wanted.logits[0])
        same(out.mtp_logits[row, mask[row].bool()], wanted.mtp_logits[0])
    assert not out.logits[mask == 0].any() and not out.mtp_logits[mask == 0].any()
    same(model(padded, attention_mask=mask.bool()), out.logits)


def test_padding_is_routed_nowhere(called):
    model, _ = called
    seen = []
    handles = [b.ffn.gate.register_forward_hook(lambda _, __, out: seen.append(out)) for b in model.layers]
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
    model(tokens(model.config, 3, 5), attention_mask=mask)
    for handle in handles:
        handle.remove()
    assert [len(routing.indices) for routing in seen] == [5, 5, 5]


def test_no_token_at_all(called):
    model, _ = called
    out = model(tokens(model.config, 2, 6), attention_mask=torch.zeros(2, 6, dtype=torch.bool), return_mtp=True)
    assert out.logits.shape == out.mtp_logits.shape == (2, 6, model.config.vocab_size)
    assert not out.logits.any() and not out.mtp_logits.any()


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 127, 128, 129])
def test_chunked_is_whole(called, chunk):
    model, same = called
    ids = tokens(model.config, 2, LENGTH if chunk < 100 else 140)
    cache = model.new_cache(2)
    out = torch.cat([model(part, cache=cache) for part in ids.split(chunk, 1)], 1)
    assert cache.lengths == (ids.shape[1],) * 2
    same(out, whole(model, ids).logits)


# Tokens that each row takes in turn: some rows stand still in the middle of a group while others go on.
STEPS = [(5, 0, 2), (0, 3, 1), (1, 0, 0), (7, 19, 2), (0, 1, 7), (2, 0, 0), (19, 2, 1), (1, 1, 1), (0, 0, 19)]


def test_ragged_batch_decodes_as_alone(called):
    model, same = called
    ids = tokens(model.config, 3, LENGTH)
    cache, rows = model.new_cache(3), [[], [], []]
    rest = tuple(LENGTH - sum(column) for column in zip(*STEPS, strict=True))
    for steps in [*STEPS, rest]:
        done, width = cache.lengths, max(steps) + 2
        chunk, mask = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.int64)
        for row, (at, n) in enumerate(zip(done, steps, strict=True)):
            chunk[row, width - n :] = ids[row, at : at + n]  # left padding
            mask[row, width - n :] = 1
        out = model(chunk, attention_mask=mask, cache=cache)
        for row, n in enumerate(steps):
            rows[row].append(out[row, width - n :])
        assert cache.lengths == tuple(at + n for at, n in zip(done, steps, strict=True))
    same(torch.stack([torch.cat(parts) for parts in rows]), whole(model, ids).logits)


def test_a_row_alone_is_the_row_among_31_others(called):
    model, same = called
    ids = tokens(model.config, 32, LENGTH)
    together = model(ids, return_mtp=True)
    alone = model(ids[13:14], return_mtp=True)
    same(together.logits[13:14], alone.logits)
    same(together.mtp_logits[13:14], alone.mtp_logits)
    ragged = torch.arange(LENGTH) < torch.tensor([LENGTH if row == 13 else row + 1 for row in range(32)])[:, None]
    same(model(ids, attention_mask=ragged)[13:14], alone.logits)


def test_cache_goes_back_to_a_snapshot(called):
    model, same = called
    ids = tokens(model.config, 2, LENGTH)
    wanted = whole(model, ids).logits
    cache = model.new_cache(2)
    model(ids[:, :19], cache=cache)
    snapshot = cache.snapshot()
    for _ in range(2):
        model(tokens(model.config, 2, 13, seed=9), cache=cache)
        cache.restore(snapshot)
        assert cache.lengths == (19, 19)
    same(model(ids[:, 19:], cache=cache), wanted[:, 19:])


def test_cache_keeps_the_selected_documents_in_order(called):
    model, same = called
    ids, more = tokens(model.config, 4, 21), tokens(model.config, 3, 17, seed=5)
    mask = torch.arange(21) < torch.tensor([21, 3, 14, 9])[:, None]
    cache = model.new_cache(4)
    model(ids, attention_mask=mask, cache=cache)
    cache.select([2, 0, 2])
    assert cache.lengths == (14, 21, 14)
    out = model(more, cache=cache)
    for row, (document, held) in enumerate([(2, 14), (0, 21), (2, 14)]):
        text = torch.cat([ids[document, :held], more[row]])[None]
        same(out[row], whole(model, text).logits[0, held:])


def test_drafts_in_steps_are_drafts_at_once(called):
    """The MTP block with its own cache, one token behind the trunk."""
    model, same = called
    ids = tokens(model.config, 1, LENGTH)
    wanted = model(ids, return_mtp=True).mtp_logits[0, :-1]
    cache, parts = model.new_cache(1), []
    for start, end in ((0, 6), (6, 7), (7, 20), (20, LENGTH - 1)):
        segments = Segments.from_lengths([end - start], cache.lengths)
        streams = model.trunk(ids[0, start:end], segments, cache).streams
        hidden, _ = model.draft(streams, ids[0, start + 1 : end + 1], segments, cache)
        parts.append(model.logits(hidden))
    assert cache.draft_lengths == (LENGTH - 1,)
    same(torch.cat(parts), wanted)


def test_cache_of_the_mtp_block_goes_back_and_is_selected_too(called):
    """Its documents are one token shorter than the trunk's, here both shorter than the window."""
    model, same = called
    ids, lengths, order = tokens(model.config, 2, 9), (5, 3), [1, 0, 1]
    wanted = whole(model, ids).mtp_logits
    cache, begun, step = model.new_cache(2), Segments.from_lengths(lengths), Segments.from_lengths([1, 1], lengths)
    first, then = ([ids[row, at : at + n] for row, n in enumerate(lengths)] for at in (0, 1))
    model.draft(model.trunk(torch.cat(first), begun, cache).streams, torch.cat(then), begun, cache)
    ahead = model.trunk(torch.stack([ids[row, n] for row, n in enumerate(lengths)]), step, cache).streams
    snapshot = cache.snapshot()
    model.draft(ahead, ids[:, 0], step, cache)
    cache.restore(snapshot)
    cache.select(order)
    assert (cache.lengths, cache.draft_lengths) == ((4, 6, 4), (3, 5, 3))
    following = torch.stack([ids[row, lengths[row] + 1] for row in order])
    hidden, _ = model.draft(ahead[order], following, Segments.from_lengths([1] * 3, cache.draft_lengths), cache)
    same(model.logits(hidden), torch.stack([wanted[row, lengths[row]] for row in order]))


@pytest.mark.parametrize("broken", [0, 1, -1])
def test_a_call_that_fails_midway_leaves_the_cache_as_it_was(called, broken):
    model, same = called
    ids = tokens(model.config, 2, LENGTH)
    cache = model.new_cache(2)
    model(ids[:, :21], cache=cache)

    def fail(*_):
        raise MemoryError

    handle = model.layers[broken].ffn.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        model(ids[:, 21:30], cache=cache)
    handle.remove()
    assert cache.lengths == (21, 21)
    same(model(ids[:, 21:], cache=cache), model(ids)[:, 21:])


def test_segments_that_do_not_continue_the_cache_are_refused(called):
    model, _ = called
    cache = model.new_cache(1)
    model(tokens(model.config, 1, 5), cache=cache)
    with pytest.raises(InputError, match=r"documents of \[4\] tokens; the cache holds \[5\]"):
        model.trunk(tokens(model.config, 1, 2)[0], Segments.from_lengths([2], past=[4]), cache)


@pytest.mark.parametrize("documents", [[], [2], [-1]])
def test_documents_that_are_not_held_cannot_be_selected(called, documents):
    cache = called[0].new_cache(2)
    with pytest.raises(InputError, match="documents 0 to 1"):
        cache.select(documents)
