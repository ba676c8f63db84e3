"""Orders of documents: permutations that differ by seed and epoch and never change."""

import numpy as np
import pytest

from undertow.data.order import epoch_order


@pytest.mark.parametrize("documents", [1, 2, 7, 1000])
def test_an_order_is_a_permutation(documents: int):
    for seed, epoch in ((0, 0), (2**63 - 1, 3), (5, 2**62)):
        order = epoch_order(documents, seed, epoch)
        assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(documents))


def mixed(value: int) -> int:
    """Splitmix64's output function, in plain integers."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (3, 1), (2**63 - 1, 7)])
def test_an_order_sorts_by_the_documented_hash(seed: int, epoch: int):
    step = 0x9E3779B97F4A7C15
    start = mixed((mixed((seed + step) % 2**64) + epoch) % 2**64)
    wanted = sorted(range(50), key=lambda number: mixed((start + step * number) % 2**64))
    assert epoch_order(50, seed, epoch).tolist() == wanted


def test_orders_are_these_for_ever():
    assert [epoch_order(8, *given).tolist() for given in ((0, 0), (0, 1), (1, 0), (2**63 - 1, 0))] == [
        [7, 0, 2, 3, 1, 6, 4, 5],
        [1, 2, 7, 5, 3, 4, 0, 6],
        [0, 6, 5, 2, 1, 3, 7, 4],
        [4, 3, 0, 2, 5, 7, 6, 1],
    ]


def test_places_are_uniform_and_orders_unrelated():
    count = 4096
    orders = np.stack([np.argsort(epoch_order(count, seed, epoch)) for seed in range(4) for epoch in range(4)])
    relations = np.corrcoef(np.vstack([orders, np.arange(count)]))
    assert abs(relations - np.eye(len(relations))).max() < 5 / count**0.5
    quarters = np.bincount(orders[:, : count // 4].ravel() * 4 // count)
    assert abs(quarters / count - 1).max() < 0.1
