"""Facts about this machine: versions, devices, and the FP8 dialect that each architecture computes in."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers")


@dataclass(frozen=True)
class Device:
    """One device: its torch name, what it is, its architecture string, memory in bytes, and FP8 dialect or "none"."""

    device: str
    name: str
    architecture: str
    memory_bytes: int | None
    fp8_dialect: str


def versions() -> dict[str, str]:
    """Version of Python and of each package that matters, or "not installed"."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def collectives() -> dict[str, str]:
    """Version of the library that GPUs exchange by, `nccl` or `rccl`, empty for a torch without one."""
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    if not (dist.is_available() and dist.is_nccl_available()):
        return {}
    return {"rccl" if torch.version.hip else "nccl": ".".join(map(str, nccl.version()))}


def fp8_dialect(architecture: str) -> str:
    """Which E4M3 a chip's matrix units read, "ocp" or "fnuz", or "none"."""
    from undertow.quant.dialect import native_dialect

    return native_dialect(architecture) or "none"


def devices() -> list[Device]:
    """The CPU, then every GPU that torch sees, NVIDIA or AMD."""
    import torch

    from undertow.quant.kernels import architecture as gpu_architecture

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [
        Device("cpu", f"{cores} cores, {torch.get_num_threads()} threads", platform.machine(), _host_memory(), "none")
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = gpu_architecture(torch.device("cuda", index))
        found.append(
            Device(f"cuda:{index}", properties.name, architecture, properties.total_memory, fp8_dialect(architecture))
        )
    return found


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
