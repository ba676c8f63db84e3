"""Which variables follow from a node's network, and why."""

from dataclasses import replace

from tests.launch.preflight.addresses import ADDRESSES
from undertow.launch.preflight.network import Interface, interfaces
from undertow.launch.preflight.rdma import ports
from undertow.launch.preflight.variables import variables


def _proposed(network, devices, environment=None) -> dict[str, tuple[str | None, str]]:
    return {v.name: (v.value, v.reason) for v in variables(network, devices, environment or {})}


def _node(place):
    return interfaces(place / "sys", place / "proc", ADDRESSES.get), ports(place / "sys")


def test_eight_ports_over_ethernet(node):
    found = _proposed(*_node(node("eight_mlx5")))
    devices = ",".join(f"mlx5_{i}:1" for i in range(8))
    assert found == {
        "NCCL_SOCKET_IFNAME": ("=eth0", "up, 10.0.0.5, has the default route"),
        "GLOO_SOCKET_IFNAME": ("eth0", "up, 10.0.0.5, has the default route"),
        "NCCL_IB_HCA": (f"={devices}", "8 active of 400 Gbit/s, Ethernet"),
        "NCCL_IB_GID_INDEX": (
            "3",
            "RoCE v2 with an IPv4 address on every port; NCCL 2.21 and later chooses by itself where it is not set",
        ),
    }


def test_ports_that_are_down_slower_or_of_another_link_are_left_out(node):
    network, devices = _node(node("eight_mlx5"))
    devices[0] = replace(devices[0], state="DOWN")
    devices[1] = replace(devices[1], gbit=100.0)
    devices[2] = replace(devices[2], link="InfiniBand")
    value, reason = _proposed(network, devices)["NCCL_IB_HCA"]
    assert value == "=mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1"
    assert reason == (
        "5 active of 400 Gbit/s, Ethernet; left out: mlx5_0:1 (DOWN), mlx5_1:1 (100 Gbit/s), mlx5_2:1 (InfiniBand)"
    )


def test_no_index_is_proposed_where_none_is_right(node):
    network, devices = _node(node("eight_mlx5"))
    infiniband = [replace(port, link="InfiniBand") for port in devices]
    assert _proposed(network, infiniband)["NCCL_IB_GID_INDEX"] == (None, "not needed on InfiniBand")
    bare = [replace(devices[0], gids=devices[0].gids[:2]), devices[1]]
    assert _proposed(network, bare)["NCCL_IB_GID_INDEX"] == (
        None,
        "no RoCE v2 IPv4 address on mlx5_0:1: give their interfaces one",
    )
    moved = replace(devices[0], gids=tuple(replace(gid, index=gid.index + 2) for gid in devices[0].gids))
    value, reason = _proposed(network, [moved, devices[1]])["NCCL_IB_GID_INDEX"]
    assert value is None
    assert reason.startswith("the RoCE v2 IPv4 address has no common index (mlx5_0:1 5, mlx5_1:1 3)")


def test_a_node_without_rdma(node):
    found = _proposed(*_node(node("ethernet_alone")))
    told = "up, 10.0.0.5, 10 Gbit/s; none has the default route, others are no faster"
    assert found["NCCL_SOCKET_IFNAME"] == ("=eth0", told)
    assert found["NCCL_IB_HCA"] == (
        None,
        "no RDMA device: nodes exchange over sockets, which is slow for more than a trial",
    )
    assert found["NCCL_IB_GID_INDEX"] == (None, "no RDMA device in use")


def test_ports_without_a_cable(node):
    network, devices = _node(node("eight_mlx5"))
    down = [replace(port, state="DOWN") for port in devices[:2]]
    value, reason = _proposed(network, down)["NCCL_IB_HCA"]
    assert (value, reason) == (None, "no port of mlx5_0:1, mlx5_1:1 is active: look at cables, switch and driver")


def test_a_container_whose_one_interface_is_no_hardware():
    pair = Interface("eth0", "up", 10000, 1500, "ethernet", False, "172.17.0.2", True)
    assert _proposed([pair], [])["GLOO_SOCKET_IFNAME"] == ("eth0", "up, 172.17.0.2, has the default route")
    value, reason = _proposed([replace(pair, default_route=False)], [])["GLOO_SOCKET_IFNAME"]
    assert value is None and reason.startswith("no interface is up with an IPv4 address")


def test_what_is_set_is_told():
    (first, *rest) = variables([], [], {"NCCL_SOCKET_IFNAME": "=ib0"})
    assert first.present == "=ib0" and {v.present for v in rest} == {None}
