"""A model directory made ready for the engine: weights on a device that exists, and the tokenizer if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from undertow.config.errors import InputError
from undertow.ops import Ops

if TYPE_CHECKING:
    from undertow.data.tokenizer import Tokenizer
    from undertow.model.transformer import Transformer


def load_directory(
    directory: str | Path, dtype: torch.dtype, device: str | torch.device, batch_invariant: bool
) -> Transformer:
    """The model of `directory`. Raises `InputError` for a device that is not there, and as `load_model` does."""
    from undertow.checkpoint.directory import load_model

    place = checked_device(device)
    ops = Ops(batch_invariant=batch_invariant, device=place)
    return load_model(directory, dtype=dtype, device=place, ops=ops)


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The directory's tokenizer, or None where there is no `tokenizer.json`."""
    from undertow.data.tokenizer import Tokenizer

    return Tokenizer.from_directory(directory) if (Path(directory) / "tokenizer.json").is_file() else None


def checked_device(device: str | torch.device) -> torch.device:
    """The device, which must be the CPU or a GPU that torch sees; AMD GPUs too are called `cuda`."""
    try:
        place = torch.device(device)
    except RuntimeError:
        raise InputError(f"device '{device}' is not known: give cpu, cuda or cuda:N") from None
    if place.type not in ("cpu", "cuda"):
        raise InputError(f"device '{device}' is not supported: give cpu, cuda or cuda:N")
    gpus = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= gpus:
        raise InputError(f"device '{device}' is not there: torch sees {gpus} GPUs (`undertow doctor` shows them)")
    return place
