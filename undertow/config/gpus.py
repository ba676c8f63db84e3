"""What is known of each GPU that runs are planned for or measured on: sizes, rates, and where each figure is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Source = Literal["vendor", "measured", "public", "computed", "unknown"]
"""`vendor`: its data sheet or documentation; `measured`: read off a device; `public`: source code or a page of somebody
else; `computed`: from other figures; `unknown`: not confirmed anywhere."""

Dialect = Literal["fnuz", "ocp", "ocp+mx"]
"""8-bit floating point that the matrix units read. FNUZ has a largest e4m3 of 240 and another code for NaN, OCP one of
448; MX adds shared scales of 32 values."""


@dataclass(frozen=True)
class Gpu:
    """One model of GPU. Rates are dense and without sparsity, in operations or bytes a second.

    `memory` is in bytes (10^9 to the GB that is sold), `bandwidth` that of the memory, `link` one way between GPUs of a
    machine, all links together; `lds` the bytes of shared memory of one compute unit; `fp4` is 0 without FP4 units;
    `domain` are the GPUs that links join. Figures that `sources` does not name are the vendor's.
    """

    name: str
    arch: str
    compute_units: int
    memory: int
    bandwidth: float
    bf16: float
    fp8: float
    link: float
    lds: int
    dialect: Dialect
    sources: Mapping[str, Source] = field(default_factory=dict, hash=False)
    fp4: float = 0.0
    domain: int = 8

    def source(self, figure: str) -> Source:
        """Where the figure of that name is from."""
        return self.sources.get(figure, "vendor")


_GB, _TB, _TERA, _KIB = 10**9, 1e12, 1e12, 1024

GPUS: tuple[Gpu, ...] = (
    Gpu(
        "MI300X", "gfx942", 304, 192 * _GB, 5.3 * _TB, 1307.4 * _TERA, 2614.9 * _TERA, 448e9, 64 * _KIB, "fnuz",
        {"link": "public"},
    ),
    # No data sheet: 80 compute units at the rate of an MI300X's are an upper bound.
    Gpu(
        "MI308X", "gfx942", 80, 192 * _GB, 5.3 * _TB, 344 * _TERA, 688 * _TERA, 448e9, 64 * _KIB, "fnuz",
        {"compute_units": "public", "memory": "unknown", "bandwidth": "public", "bf16": "computed", "fp8": "computed",
         "link": "unknown", "lds": "unknown", "dialect": "unknown"},
    ),
    Gpu(
        "MI325X", "gfx942", 304, 256 * _GB, 6.0 * _TB, 1307.4 * _TERA, 2614.9 * _TERA, 448e9, 64 * _KIB, "fnuz",
        {"link": "public"},
    ),
    Gpu(
        "MI355X", "gfx950", 256, 288 * _GB, 8.0 * _TB, 2516.6 * _TERA, 5033 * _TERA, 537.6e9, 160 * _KIB, "ocp",
        {"link": "public"}, 10066 * _TERA,
    ),
    Gpu("H100", "sm_90", 132, 80 * _GB, 3.35 * _TB, 989.4 * _TERA, 1978.9 * _TERA, 450e9, 228 * _KIB, "ocp"),
    Gpu("H200", "sm_90", 132, 141 * _GB, 4.8 * _TB, 989.4 * _TERA, 1978.9 * _TERA, 450e9, 228 * _KIB, "ocp"),
    Gpu(
        "B200", "sm_100", 148, 192 * _GB, 8.0 * _TB, 2250 * _TERA, 4500 * _TERA, 900e9, 228 * _KIB, "ocp+mx",
        {"compute_units": "unknown"}, 9000 * _TERA,
    ),
    Gpu(
        "GB300", "sm_103", 160, 288 * _GB, 8.0 * _TB, 2500 * _TERA, 5000 * _TERA, 900e9, 228 * _KIB, "ocp+mx",
        {"compute_units": "public"}, 15000 * _TERA, 72,
    ),
)  # fmt: skip

# Other boards, or parts of one, under the same name: their rates differ.
_OTHERS = frozenset(("NVL", "PCIE", "MIG"))


def find_gpu(device_name: str) -> Gpu | None:
    """The entry for a device name as torch gives it ("NVIDIA H200", "AMD Instinct MI300X"); None for an unlisted one.

    A PCIe or NVL board or a MIG slice is none of the entries, which are the full SXM and OAM modules.
    """
    words = {word.upper() for word in device_name.replace("-", " ").split()}
    if words & _OTHERS:
        return None
    return next((gpu for gpu in GPUS if gpu.name in words), None)
