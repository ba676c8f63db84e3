"""Tensors of a model directory under their native names, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from undertow.checkpoint.faults import Faults, check_values, compare, mtp_hint, refuse_quantised
from undertow.checkpoint.names import detect_spelling, expected_tensors, native_tensors, pieces
from undertow.checkpoint.shards import Shards
from undertow.config.errors import InputError
from undertow.config.model import ModelConfig


def read_tensors(
    directory: Path, config: ModelConfig, dtypes: Mapping[str, torch.dtype], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """The native tensors of `config` from a directory in any format, cast to `dtypes` (by native name), on `device`.

    Each is copied out of the files on its own, so the files may change afterwards and nothing is held twice.
    Raises one `InputError` for all faults together.
    """
    with Shards(directory) as shards:
        spelling = detect_spelling((name for name in shards.headers if not name.endswith(".scale")), config)
        if spelling is None:
            first = ", ".join(list(shards.headers)[:3])
            raise InputError(f"{directory}: the tensors ({first}, ...) follow no naming of a DeepSeek-V4 model")
        expected = expected_tensors(config, spelling)
        refuse_quantised(directory, shards.headers, expected)
        faults = Faults(directory)
        fitting = compare(shards.headers, expected, faults)
        state = {}
        for native, (shape, kind) in native_tensors(config).items():
            parts = [part for part in pieces(native, shape, spelling) if part.name in fitting]
            if not faults:
                state[native] = torch.empty(shape, dtype=dtypes[native], device=device)
            for part in parts:
                source = shards.read(part.name)
                check_values(part.name, source, kind, config.n_routed_experts, faults)
                # After the first fault the rest is still checked, to tell all at once, but no longer kept.
                if not faults:
                    part.view(state[native]).copy_(source)
            if faults:
                state.clear()
        faults.raise_if_any(mtp_hint(shards.headers, expected, config.num_nextn_predict_layers))
    return state
