"""Seconds of collectives by hand, on a mesh, behind a switch and across machines."""

from __future__ import annotations

import pytest

from undertow.config.clusters import read_gpus
from undertow.config.gpus import GPUS
from undertow.planner.timing.fabric import (
    LATENCY_ACROSS,
    LATENCY_INSIDE,
    NIC_BYTES_PER_SECOND,
    Fabric,
    Group,
    fabric_of,
)

MI355X, H200, GB300 = (fabric_of(next(gpu for gpu in GPUS if gpu.name == name)) for name in ("MI355X", "H200", "GB300"))


def test_fabrics_of_the_catalogue():
    assert (MI355X.link, MI355X.node, MI355X.mesh) == (537.6e9, 8, True)
    assert (H200.link, H200.node, H200.mesh) == (450e9, 8, False)
    assert GB300.node == 72 and H200.nic == NIC_BYTES_PER_SECOND == 50e9


@pytest.mark.parametrize(
    ("group", "inside"), [(Group(8), 8), (Group(16), 8), (Group(2, 8), 1), (Group(4, 4), 2), (Group(3), 3)]
)
def test_ranks_of_a_machine(group, inside):
    assert H200.inside(group) == inside


def test_one_rank_sends_nothing():
    for fabric in (MI355X, H200):
        for seconds in (fabric.gather_seconds, fabric.exchange_seconds, fabric.send_seconds):
            assert seconds(1e9, Group(1)) == 0


def test_gather():
    size = 1e9
    assert MI355X.gather_seconds(size, Group(8)) == pytest.approx(size * 7 / 8 / 537.6e9 + 7 * LATENCY_INSIDE)
    # Two GPUs of a mesh have one link of seven; behind a switch they have all.
    assert MI355X.gather_seconds(size, Group(2)) == pytest.approx(size / 2 / 76.8e9 + LATENCY_INSIDE)
    assert H200.gather_seconds(size, Group(2)) == pytest.approx(size / 2 / 450e9 + LATENCY_INSIDE)
    # Two machines, one rank in each: half of the bytes over one card.
    assert H200.gather_seconds(size, Group(2, 8)) == pytest.approx(size / 2 / 50e9 + LATENCY_ACROSS)
    # Two machines of eight: each card carries half of an eighth.
    across = size / 8 / 2 / 50e9 + LATENCY_ACROSS
    assert H200.gather_seconds(size, Group(16)) == pytest.approx(H200.gather_seconds(size, Group(8)) + across)


def test_exchange():
    size = 4096 * 6 * 4096 * 2
    inside = MI355X.exchange_seconds(size, Group(8))
    assert inside == pytest.approx(size * 7 / 8 / 537.6e9 + LATENCY_INSIDE)
    assert round(1e3 * inside, 2) == 0.33  # as published for 201 MB
    assert MI355X.exchange_seconds(size, Group(16)) == pytest.approx(size / 2 / 50e9 + LATENCY_ACROSS)
    assert GB300.exchange_seconds(size, Group(64)) == pytest.approx(size * 63 / 64 / 900e9 + LATENCY_INSIDE)


def test_send():
    assert H200.send_seconds(1e6, Group(4)) == pytest.approx(1e6 / 450e9 + LATENCY_INSIDE)
    assert MI355X.send_seconds(1e6, Group(4)) == pytest.approx(1e6 / 76.8e9 + LATENCY_INSIDE)
    assert H200.send_seconds(1e6, Group(4, 4)) == pytest.approx(1e6 / 50e9 + LATENCY_ACROSS)


def test_more_bandwidth_is_never_slower():
    for group in (Group(2), Group(8), Group(16), Group(4, 8), Group(6, 4)):
        for kind in ("gather_seconds", "exchange_seconds", "send_seconds"):
            at = [
                getattr(Fabric(link, 8, nic=nic), kind)(1e8, group)
                for link, nic in ((1e11, 1e10), (2e11, 1e10), (2e11, 4e10))
            ]
            assert at == sorted(at, reverse=True) and at[0] > at[-1]


def test_a_gpu_of_ones_own_may_have_a_wider_domain(tmp_path):
    path = tmp_path / "gpus.yaml"
    path.write_text("Z1: {memory: 500e9, bandwidth: 9e12, bf16: 2e15, fp8: 4e15, link: 9e11, domain: 16}\n")
    (own,) = read_gpus(path, {})
    assert fabric_of(own) == Fabric(9e11, 16, mesh=False)
