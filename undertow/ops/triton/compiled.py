"""What a kernel becomes on a chip that is not there: compiled ahead of time, and what the result needs.

`triton.compile` does not say whether a kernel fits: shared memory and spilled registers are read from what it makes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel


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
    """One compiled kernel: bytes of shared memory, registers a thread, and bytes of them spilled to memory."""

    chip: Chip
    shared: int
    registers: int
    spilled: int

    @property
    def fits(self) -> bool:
        """Whether its shared memory is there."""
        return self.shared <= self.chip.shared


def compile_for(
    chip: Chip,
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    warps: int = 4,
    stages: int = 2,
) -> Facts:
    """Compile a `triton.jit` function for a chip.

    `signature` gives the type of every run-time argument (`*bf16`, `i32`, ...), pointers taken as aligned to 16 bytes;
    `constants` the value of every `tl.constexpr`. Raises what Triton raises where it cannot be compiled.
    """
    order = list(kernel.arg_names)
    types = {name: signature.get(name, "constexpr") for name in order}
    aligned = {(order.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*")}
    values = {(order.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=aligned)
    made = triton.compile(source, target=chip.target, options={"num_warps": warps, "num_stages": stages})
    registers, spilled = _amd(made) if chip.target.backend == "hip" else _nvidia(made)
    return Facts(chip, made.metadata.shared, registers, spilled)


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
