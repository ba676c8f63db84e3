"""The GPU catalogue: names as torch gives them, and figures that must agree with each other."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from undertow.config.gpus import GPUS, find_gpu


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB300", "GB300"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI308X", "MI308X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("AMD Instinct MI355X", "MI355X"),
    ],
)
def test_names_of_torch(device, name):
    gpu = find_gpu(device)
    assert gpu is not None and gpu.name == name


@pytest.mark.parametrize(
    "device",
    ["NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 MIG 1g.18gb", "NVIDIA A100", "cpu", ""],
)
def test_other_devices_are_none_of_them(device):
    assert find_gpu(device) is None


def test_figures():
    h200, mi355x = find_gpu("NVIDIA H200"), find_gpu("AMD Instinct MI355X")
    assert h200 is not None and mi355x is not None
    assert (h200.arch, h200.compute_units, h200.memory, h200.bandwidth) == ("sm_90", 132, 141_000_000_000, 4.8e12)
    assert (h200.bf16, h200.link, h200.lds, h200.dialect) == (989.4e12, 450e9, 233_472, "ocp")
    assert (mi355x.memory, mi355x.bf16, mi355x.lds, mi355x.dialect) == (288_000_000_000, 2516.6e12, 163_840, "ocp")
    # Bytes that an MI355X shows as 268.2 GiB, and its clock times units times operations a clock.
    assert round(mi355x.memory / 2**30, 1) == 268.2
    assert pytest.approx(mi355x.fp8, rel=1e-4) == 8192 * 256 * 2.4e9
    assert mi355x.link == pytest.approx(7 * 76.8e9)


def test_mi308x_is_bounded_by_the_rate_of_an_mi300x_unit():
    whole, part = find_gpu("AMD Instinct MI300X"), find_gpu("AMD Instinct MI308X")
    assert whole is not None and part is not None
    assert part.bf16 == pytest.approx(whole.bf16 / 304 * 80, rel=1e-3)
    assert (part.source("bf16"), whole.source("bf16")) == ("computed", "vendor")


def test_every_source_names_a_figure():
    names = {field.name for field in dataclasses.fields(GPUS[0])}
    assert all(set(gpu.sources) <= names for gpu in GPUS)
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    assert all(gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=1e-3) for gpu in GPUS)


def test_import_loads_no_torch():
    probe = "import sys, undertow.config.gpus; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
