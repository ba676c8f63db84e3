"""What a kernel becomes on a chip that is not there: compiled ahead of time, and what the result needs.

`triton.compile` does not say whether a kernel fits: shared memory and spilled registers are read from what it makes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Chip:
    """An architecture to compile for; `shared` are the bytes of shared memory that a block may use."""

    name: str
    target: GPUTarget
    shared: int


CHIPS: Mapping[str, Chip] = {
    "gfx942": Chip("gfx942", GPUTarget("hip", "gfx942", 64), 64 << 10),
    "gfx950": Chip("gfx950", GPUTarget("hip", "gfx950", 64), 160 << 10),
    "sm_90": Chip("sm_90", GPUTarget("cuda", 90, 32), 227 << 10),
}


@dataclass(frozen=True)
class Facts:
    """One compiled kernel: bytes of shared memory, registers a thread, bytes of them spilled to memory, and how often
    each instruction of the matrix units stands in its code."""

    chip: Chip
    shared: int
    registers: int
    spilled: int
    matrix: Mapping[str, int]

    @property
    def fits(self) -> bool:
        """Whether its shared memory is there."""
        return self.shared <= self.chip.shared


@contextmanager
def compiling(chip: Chip) -> Iterator[list[tuple[str, Facts]]]:
    """Within, a kernel that is launched is compiled for `chip` and not run; yields name and facts of each, once.

    Tensors may lie on the meta device: kernels get the types and sizes that they would get on the chip. That the chip's
    own tiles are taken is the caller's matter.
    """
    run, found = JITFunction.run, []
    seen: set[int] = set()

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        made = run(self, *arguments, grid=grid, warmup=True, **named)
        if id(made) not in seen:  # Triton keeps what it has made
            seen.add(id(made))
            found.append((self.__name__, _facts(chip, made)))
        return made

    driver.set_active(_Absent(chip))  # type: ignore[arg-type]
    JITFunction.run = compiled  # type: ignore[method-assign]
    try:
        yield found
    finally:
        JITFunction.run = run  # type: ignore[method-assign]
        driver.set_active(None)  # type: ignore[arg-type]


class _Absent:
    """A driver as far as compiling asks one, for a chip that is not there. Triton keeps what it makes by device."""

    def __init__(self, chip: Chip):
        self._chip = chip

    def get_current_target(self) -> GPUTarget:
        return self._chip.target

    def get_current_device(self) -> str:
        return self._chip.name

    def get_current_stream(self, device: str) -> int:
        return 0


def _facts(chip: Chip, made: Any) -> Facts:
    if chip.target.backend == "hip":
        (registers, spilled), matrix = _amd(made), re.findall(r"\bv_s?mfmac?_\w+", made.asm["amdgcn"])
    else:
        found = re.findall(
            r"\b(w?g?mma)(?:\.mma_async)?\.sync\.aligned\.(?:row\.col\.)?(m\d+n\d+k\d+)", made.asm["ptx"]
        )
        (registers, spilled), matrix = _nvidia(made), [" ".join(each) for each in found]
    return Facts(chip, made.metadata.shared, registers, spilled, dict(sorted(Counter(matrix).items())))


def _amd(made: CompiledKernel) -> tuple[int, int]:
    """Vector registers and bytes of scratch memory a thread, from the assembly's metadata."""
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", made.asm["amdgcn"]))
    return int(found["vgpr_count"]), int(found["private_segment_fixed_size"])


def _nvidia(made: CompiledKernel) -> tuple[int, int]:
    """Registers and bytes of stack a thread, from the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(made.asm["cubin"])
        told = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK):(\d+)", told.stdout))
    return int(found["REG"]), int(found["STACK"])
