"""Numbers as text of a page."""

from __future__ import annotations

from collections.abc import Iterable

GB, GIB = 10**9, 2**30
_SHORT = {"csa": "CSA", "hca": "HCA", "swa": "SWA", "moe": "MoE", "mtp": "MTP"}


def digits(largest: int) -> int:
    """Decimals that bytes are written with where `largest` are the most."""
    return 1 if largest >= 10 * GB else 3


def gb(size: int, decimals: int = 1) -> str:
    """In 10^9 bytes, without the unit."""
    return f"{size / GB:,.{decimals}f}"


def gib(size: int, decimals: int = 1) -> str:
    """In 2^30 bytes, without the unit."""
    return f"{size / GIB:,.{decimals}f}"


def ceiling(limit: int, sizes: Iterable[int]) -> float:
    """Where a picture of sizes ends: above the limit and all of them, or above them alone where they are far below."""
    most = max(sizes)
    return 1.04 * (max(limit, most) if most > limit / 20 else most)


def both(size: int) -> str:
    """In both units, with them."""
    decimals = digits(abs(size))
    return f"{gb(size, decimals)} GB ({gib(size, decimals)} GiB)"


def significant(value: float, figures: int = 4) -> str:
    """So many significant figures, thousands apart, without an exponent; more in front of the point stay."""
    if not value:
        return "0"
    return f"{value:,.{max(0, figures - _leading(value))}f}"


def _leading(value: float) -> int:
    """Digits in front of the point, negative for zeros behind it."""
    return int(f"{value:e}".partition("e")[2]) + 1


def billions(count: int) -> str:
    """Parameters with a unit that suits."""
    if count < 1e5:
        return f"{count:,}"
    return f"{count / 1e9:,.2f} B" if count >= 1e7 else f"{count / 1e6:,.2f} M"


def words(name: str) -> str:
    """A name of the plan as words."""
    return " ".join(_SHORT.get(word, word) for word in name.split("_"))
