"""Compiles kernels for a chip ahead of time, in a process without the interpreter; prints their facts as JSON."""

from __future__ import annotations

import json
import sys

from undertow.ops.triton import block_scales, mxfp4, records
from undertow.ops.triton.compiled import CHIPS, Chip, compile_for

SIZES = dict.fromkeys(("rows", "columns", "grid_rows", "grid_columns"), "i32")


def _blocks(hardware: bool):
    """Every tile that the host side chooses for wide matrices: kernel, types, constants, warps."""
    for columns, square, ue8m0, warps in (
        (128, False, True, 2), (128, False, False, 2), (64, False, True, 2), (32, False, True, 2),
        (128, True, True, 4), (128, True, False, 4), (32, True, True, 4),
    ):  # fmt: skip
        scale = "*u8" if ue8m0 else "*fp32"
        types = {"x": "*bf16", "codes": "*u8", "scales": scale, **SIZES, "floor": "i32", "doubled": "i32"}
        rows, groups = (columns, 8 if columns == 32 else 1) if square else (1, 1024 // columns)
        side = columns if square else 1
        tile = {"ROWS": rows, "GROUPS": groups, "GROUP": columns, "SQUARE": square, "UE8M0": ue8m0}
        name = f"quantise {'square' if square else 'row'} {columns} {scale}"
        yield name, block_scales._quantise, types, {**tile, "FP4": False, "HARDWARE": hardware}, warps
        types = {"codes": "*u8", "scales": scale, "out": "*bf16", **SIZES}
        rows, groups = (8, 512 // columns) if square else (1, 4096 // columns)
        tile = {"ROWS": rows, "GROUPS": groups, "GROUP": columns, "SIDE": side, "UE8M0": ue8m0}
        for fnuz in (False, True):
            constants = {**tile, "FP4": False, "FNUZ": fnuz, "HARDWARE": hardware}
            yield f"de{name} fnuz={fnuz}", block_scales._dequantise, types, constants, 4


def _others(hardware: bool, by_pairs: bool):
    shape = {"SIZE": 584, "PLAIN": 448, "ROTATED": 64, "GROUPS": 8, "TURNED": 64, "HARDWARE": hardware}
    types = {"entries": "*bf16", "stride": "i32", "records": "*u8", "turned": "*bf16", "count": "i32", "floor": "i32"}
    yield "write records", records._write, types, {**shape, "ROWS": 16}, 2
    types = {"records": "*u8", "turned": "*bf16", "entries": "*bf16", "count": "i32"}
    yield "read records", records._read, types, {**shape, "ROWS": 4}, 4
    sizes = {"rows": "i32", "pairs": "i32", "grid_columns": "i32"}
    types = {"words": "*i32", "codes": "*u8", "scales": "*u8", **sizes}
    tile = {"ROWS": mxfp4._ROWS, "GROUPS": mxfp4._GROUPS}
    yield "write mxfp4", mxfp4._write, {**types, "floor": "i32"}, {**tile, "BY_PAIRS": by_pairs}, 1
    yield "read mxfp4", mxfp4._read, types, tile, 2


def facts(chip: Chip, few: bool) -> list[dict[str, object]]:
    """Of every kernel, or of those beside blocks alone."""
    hardware = chip.name != "gfx942"
    found = []
    for name, kernel, types, constants, warps in (
        *([] if few else _blocks(hardware)),
        *_others(hardware, chip.name == "sm_90"),
    ):
        made = compile_for(chip, kernel, types, constants, warps=warps)
        found.append({"name": name, "fits": made.fits, "registers": made.registers, "spilled": made.spilled})
    return found


if __name__ == "__main__":
    print(json.dumps(facts(CHIPS[sys.argv[1]], few=sys.argv[2] == "few")))
