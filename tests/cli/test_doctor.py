import json
import sys
from types import SimpleNamespace

import pytest
import torch

from undertow.cli import machine, main
from undertow.ops import registry
from undertow.ops.registry import OPS, TRITON
from undertow.quant.kernels import architecture


def test_json_tells_versions_devices_and_every_operator(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (
        facts["versions"]["torch"] == torch.__version__.split("+")[0] or facts["versions"]["torch"] == torch.__version__
    )
    assert facts["versions"]["python"] == sys.version.split()[0]
    assert facts["devices"][0]["device"] == "cpu" and facts["devices"][0]["fp8_dialect"] == "none"
    cpu = {choice["op"]: choice for choice in facts["ops"]["cpu"]}
    assert tuple(cpu) == OPS
    assert cpu["linear"]["chosen"] == "reference"
    assert cpu["linear"]["refused"] == {"triton": "no triton kernel for linear in this version"}
    keys = {op: choice["key"] for op, choice in cpu.items()}
    assert (keys["linear"], keys["sparse_attention"]) == ("ops.linear", "attention.backend")
    assert keys["csa_attention"] == "attention.csa_backend"


def test_tables_show_the_reasons(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out.partition("op on cpu")[2].partition("op on ")[0]
    rows = [line.split() for line in out.splitlines()]
    assert ["sparse_attention", "reference", "attention.backend"] in rows
    remarks = " ".join(out.split())
    kept = [op for op in OPS if op not in TRITON]
    assert f"triton kernels run on a GPU: {', '.join(op for op in OPS if op in TRITON)}" in remarks
    assert f"no triton kernel in this version: {', '.join(kept)}" in remarks
    assert max(map(len, out.splitlines())) <= 100


def test_what_kernels_serve_is_said_once_of_their_operators(capsys, monkeypatch):
    monkeypatch.setattr(registry, "machine", lambda device: registry.Machine("cuda", "sm_90"))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out.partition("op on cpu")[2].partition("op on ")[0]
    assert ["csa_attention", "triton", "attention.csa_backend"] in [line.split() for line in out.splitlines()]
    remarks = " ".join(out.split())
    serves = TRITON["sparse_attention"].serves
    assert remarks.count(f"triton serves {serves}; other calls go to the reference: sparse_attention, csa_att") == 1
    assert "8, 16, 32, 64 or 128 attention heads of a multiple of 16" in remarks
    assert max(map(len, out.splitlines())) <= 100


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    assert machine.versions()["no-such-package"] == "not installed"


@pytest.mark.parametrize(
    ("architecture", "dialect"),
    [
        ("gfx942", "fnuz"),
        ("gfx940", "fnuz"),
        ("gfx950", "ocp"),
        ("gfx1201", "ocp"),
        ("gfx90a", "none"),
        ("gfx1100", "none"),
        ("sm_80", "none"),
        ("sm_89", "ocp"),
        ("sm_90", "ocp"),
        ("sm_100", "ocp"),
        ("x86_64", "none"),
    ],
)
def test_the_fp8_dialect_follows_the_architecture_string(architecture: str, dialect: str):
    assert machine.fp8_dialect(architecture) == dialect


def test_the_architecture_string_of_a_gpu(monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    assert architecture(torch.device("cuda")) == "sm_90"
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert architecture(torch.device("cuda")) == "gfx942"


def test_each_kind_of_device_has_its_operators_once(monkeypatch):
    from undertow.cli import doctor

    gpu = SimpleNamespace(name="AMD Instinct MI308X", gcnArchName="gfx942:sramecc+:xnack-", total_memory=192 * 2**30)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    facts = doctor.examine()
    assert [(d["device"], d["architecture"], d["fp8_dialect"]) for d in facts["devices"][1:]] == [
        ("cuda:0", "gfx942", "fnuz"),
        ("cuda:1", "gfx942", "fnuz"),
    ]
    assert list(facts["ops"]) == ["cpu", "cuda"]
    assert facts["torch_built_for"] == "ROCm 7.2"


def test_the_preflight_is_in_both_forms(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_9")
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["preflight"]
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX")
    assert tuple(each["name"] for each in facts["variables"]) == names
    assert facts["variables"][2]["present"] == "mlx5_9"
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"node {facts['node']}; kernel {facts['kernel']}; GPU drivers: " in out
    assert "; set now to mlx5_9" in " ".join(out.split())
    for each in facts["interfaces"]:
        assert f"\n{each['name']} " in out


def test_nodes_are_compared(capsys, tmp_path):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    ours, theirs = tmp_path / "a.json", tmp_path / "b.json"
    ours.write_text(json.dumps(facts))
    theirs.write_text(json.dumps(facts | {"system": "Linux aarch64"}))
    assert main(["doctor", "--compare", str(ours), str(ours)]) == 0
    assert capsys.readouterr().out == "nothing that matters differs\n"
    assert main(["doctor", "--compare", str(ours), str(theirs)]) == 1
    assert capsys.readouterr().out == f"system: {facts['system']} on {ours}, Linux aarch64 on {theirs}\n"
    assert main(["doctor", "--compare", str(ours), str(tmp_path / "none.json")]) == 2
    assert "none.json: cannot be read" in capsys.readouterr().err
