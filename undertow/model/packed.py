"""Models that hold matrices as codes: which ones may, how they come to, and that such a model runs forward alone."""

from __future__ import annotations

from torch import nn

from undertow.config.errors import InputError
from undertow.config.spelling import some
from undertow.model.compressor import Compressor
from undertow.model.layers import Linear
from undertow.model.moe import Experts
from undertow.quant.quantised import Quantised


def can_hold(model: nn.Module, name: str) -> bool:
    """Whether the parameter `name` may be codes: those of `Linear` and `Experts` may, which call operators for them.
    Compressors read theirs in float32, and the grouped output projection cuts its own in groups."""
    place = name.rpartition(".")[0]
    above = model.get_submodule(place.rpartition(".")[0])
    return isinstance(model.get_submodule(place), (Linear, Experts)) and not isinstance(above, Compressor)


def hold(model: nn.Module, name: str, weight: Quantised) -> None:
    """Put `weight` in the place of the parameter `name` of its shape, of which `can_hold` is true. It is a plain
    attribute: no parameter, in no state, and `model.to` leaves it where it is."""
    place, _, leaf = name.rpartition(".")
    owner = model.get_submodule(place)
    delattr(owner, leaf)
    setattr(owner, leaf, weight)


def packed_names(model: nn.Module) -> list[str]:
    """Names of the matrices that are held as codes."""
    held = (
        (f"{place}.{leaf}", value)
        for place, owner in model.named_modules()
        if isinstance(owner, (Linear, Experts))
        for leaf, value in vars(owner).items()
    )
    return [name for name, value in held if isinstance(value, Quantised)]


def refuse_packed(model: nn.Module, what: str) -> None:
    """Raises `InputError`, which begins with `what`, for a model that holds matrices as codes."""
    if names := packed_names(model):
        raise InputError(
            f"{what}: this model holds {some(names)} as FP8 or FP4 codes, which serve forward alone; load it without "
            "packed=True"
        )
