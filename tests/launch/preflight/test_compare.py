"""What differs between two nodes."""

import copy
import json

import pytest

from undertow.config.errors import InputError
from undertow.launch.preflight.compare import differences, read_facts

PORT = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "gbit": 400.0, "gids": [{"index": 3}], "roce_index": 3}
FACTS = {
    "versions": {"torch": "2.13.0", "nccl": "2.27.5"},
    "devices": [{"device": "cpu", "name": "64 cores"}, {"device": "cuda:0", "name": "NVIDIA H200"}],
    "preflight": {
        "node": "a",
        "interfaces": [{"name": "eth0", "state": "up", "ipv4": "10.0.0.5"}],
        "rdma": [PORT, {**PORT, "port": 2}],
        "variables": [{"name": "NCCL_IB_GID_INDEX", "value": "3", "reason": "x", "present": None}],
    },
    "ops": {"cpu": []},
}


def test_addresses_and_names_do_not_count():
    other = copy.deepcopy(FACTS)
    other["preflight"]["node"] = "b"
    other["preflight"]["interfaces"][0]["ipv4"] = "10.0.0.6"
    other["preflight"]["variables"][0]["reason"] = "y"
    other["preflight"]["rdma"][0]["gids"] = []
    other["ops"] = {}
    assert differences(FACTS, other, ("a", "b")) == []


def test_every_difference_is_a_line():
    other = copy.deepcopy(FACTS)
    other["versions"] = {"torch": "2.11.0", "rccl": "2.22.3"}
    other["devices"].append({"device": "cuda:1", "name": "NVIDIA H200"})
    other["preflight"]["rdma"][1]["state"] = "DOWN"
    other["preflight"]["variables"][0]["value"] = None
    assert differences(FACTS, other, ("a", "b")) == [
        "versions.torch: 2.13.0 on a, 2.11.0 on b",
        "versions.nccl: on a alone",
        "versions.rccl: on b alone",
        "devices.cuda:1: on b alone",
        "preflight.rdma.mlx5_0:2.state: ACTIVE on a, DOWN on b",
        "preflight.variables.NCCL_IB_GID_INDEX.value: 3 on a, null on b",
    ]


def test_files_that_are_not_of_doctor_are_refused(tmp_path):
    file = tmp_path / "a.json"
    with pytest.raises(InputError, match="cannot be read"):
        read_facts(file)
    for wrong in ("{", "[]", json.dumps({"versions": {}})):
        file.write_text(wrong)
        with pytest.raises(InputError, match="give what"):
            read_facts(file)
    file.write_text(json.dumps(FACTS))
    assert read_facts(file) == FACTS
