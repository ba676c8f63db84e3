"""Which chip computes in which dialect."""

from __future__ import annotations

import subprocess
import sys

import pytest

from undertow.config.errors import InputError
from undertow.config.gpus import GPUS
from undertow.quant.dialect import native_dialect


@pytest.mark.parametrize(
    ("architecture", "dialect"),
    [
        ("gfx942", "fnuz"),
        ("gfx940", "fnuz"),
        ("gfx942:sramecc+:xnack-", "fnuz"),
        ("gfx950", "ocp"),
        ("gfx1200", "ocp"),
        ("gfx1250", "ocp"),
        ("sm_89", "ocp"),
        ("sm_90", "ocp"),
        ("sm_90a", "ocp"),
        ("sm_100", "ocp"),
        ("sm_103", "ocp"),
        ("sm_120", "ocp"),
        ("gfx90a", None),
        ("gfx1100", None),
        ("sm_80", None),
        ("x86_64", None),
        ("aarch64", None),
    ],
)
def test_dialect_of_an_architecture(architecture, dialect):
    assert native_dialect(architecture) == dialect


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_agrees_with_the_catalogue_of_gpus(gpu):
    assert native_dialect(gpu.arch) == gpu.dialect.split("+")[0]


@pytest.mark.parametrize("name", ["MI325X", "gfx", "sm90", "", "cuda"])
def test_a_name_that_is_no_architecture_is_refused(name):
    with pytest.raises(InputError, match="is unknown; gfxNNN, sm_NN or the processor's name"):
        native_dialect(name)


def test_needs_no_torch():
    probe = "import sys, undertow.quant.dialect; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
