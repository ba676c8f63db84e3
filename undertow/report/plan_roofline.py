"""The roofline of a plan: ceilings of the GPU, fitted rates, and every operation by its arithmetic intensity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from undertow.report.plan_table import grid, note
from undertow.report.quantity import significant

_WIDTH, _HEIGHT = 1000, 300  # of the drawing, in its own units
_APART = (0.075, 0.055)  # numbers that are nearer than this share of the picture move up
_TOLD = (
    "One forward pass of a microbatch on one GPU. Intensity is operations over bytes: weights, operands and results of "
    "each operation, read or written once; what stays inside of one kernel does not count. Heights are planned rates, "
    "seconds those of an iteration, forward and backward, for a pipeline rank on average, without what is recomputed."
)
_ROOF = (
    "Marked ones are planned faster than memory allows: one fitted rate stands for all products, and what is "
    "small is planned too fast, other things too slow."
)


@dataclass(frozen=True)
class _Scale:
    """Logarithmic axes: shares of the picture, from the left and from below."""

    left: float
    right: float
    low: float
    high: float

    def across(self, intensity: float) -> float:
        return math.log(intensity / self.left) / math.log(self.right / self.left)

    def up(self, rate: float) -> float:
        return math.log(rate / self.low) / math.log(self.high / self.low)

    def at(self, intensity: float, rate: float) -> str:
        return f"{_WIDTH * self.across(intensity):.1f},{_HEIGHT * (1 - self.up(rate)):.1f}"


def roofline_section(roofline: Mapping[str, Any]) -> str:
    """Picture and table from `roofline` of the document."""
    gpu, done = roofline["gpu"], roofline["operations"]
    scale = _scale(gpu, done)
    picture = f'<figure class="roof"><figcaption>TFLOP/s of a GPU</figcaption>{_plot(roofline, scale)}'
    kinds = "; ".join(f"{kind.upper()}: {name} attention" for kind, name in roofline["kinds"].items())
    rows = [_row(number, each, gpu) for number, each in enumerate(done, start=1)]
    total = ["all operations", "", "", "", "", significant(sum(each["seconds"] for each in done))]
    head = ["operation", "places", "FLOP/byte", "TFLOP/s", "roof", "s an iteration"]
    marked = any(_over(each, gpu) for each in done)
    return (
        f'{note(_TOLD)}{picture}<div class="x-name">FLOP/byte</div></figure>'
        f"{note(_ROOF) if marked else ''}{grid(head, rows, total)}{note(_sources(roofline) + ' ' + kinds + '.')}"
    )


def _row(number: int, each: Mapping[str, Any], gpu: Mapping[str, Any]) -> list[str]:
    roof = f"{significant(_roof(each, gpu) / 1e12)}{chr(10) + 'planned above' if _over(each, gpu) else ''}"
    rate = significant(each["rate"] / 1e12)
    sizes = [str(each["count"]), significant(each["intensity"]), rate, roof, significant(each["seconds"], 3)]
    return [f"{number}  {each['name']}", *sizes]


def _roof(each: Mapping[str, Any], gpu: Mapping[str, Any]) -> float:
    return min(gpu["bf16"], gpu["bandwidth"] * each["intensity"])


def _over(each: Mapping[str, Any], gpu: Mapping[str, Any]) -> bool:
    return each["rate"] > _roof(each, gpu)


def _sources(roofline: Mapping[str, Any]) -> str:
    gpu, rates = roofline["gpu"], roofline["rates"]
    return (
        f"{gpu['name']}: {gpu['bf16'] / 1e12:,.4g} TFLOP/s in BF16 ({gpu['sources']['bf16']}), "
        f"{gpu['bandwidth'] / 1e12:,.4g} TB/s ({gpu['sources']['bandwidth']}). Rate of products "
        f"{rates['matrix']['rate'] / 1e12:,.4g} TFLOP/s, {rates['matrix']['mark']}; of the heads "
        f"{rates['heads']['rate'] / 1e12:,.4g}, {rates['heads']['mark']}."
    )


def _scale(gpu: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> _Scale:
    intensities = [each["intensity"] for each in done] + [gpu["bf16"] / gpu["bandwidth"]]
    rates = [each["rate"] for each in done] + [gpu["bf16"]]
    return _Scale(min(intensities) / 1.6, max(intensities) * 2.5, min(rates) / 4, max(rates) * 2)


def _plot(roofline: Mapping[str, Any], scale: _Scale) -> str:
    gpu, rates = roofline["gpu"], roofline["rates"]
    ridge = gpu["bf16"] / gpu["bandwidth"]
    start = max(scale.left, scale.low / gpu["bandwidth"])
    roof = (
        f"M{scale.at(start, gpu['bandwidth'] * start)}L{scale.at(ridge, gpu['bf16'])}"
        f"L{scale.at(scale.right, gpu['bf16'])}"
    )
    lines = [f'<path class="grid" d="{_grid(scale)}"/>', f'<path class="line c1" d="{roof}"/>']
    named = [_name(scale.across(ridge) / 2 + 0.5, scale.up(gpu["bf16"]), "peak in BF16")]
    named.append(_name(0.0, scale.up(gpu["bandwidth"] * start) + 0.09, "memory", left=scale.across(start) + 0.03))
    for key, text in (("matrix", "products"), ("heads", "heads")):
        y = _HEIGHT * (1 - scale.up(rates[key]["rate"]))
        lines.append(f'<path class="dash" style="--k:var(--still)" d="M0,{y:.1f}H{_WIDTH}"/>')
        named.append(_name(0.0, scale.up(rates[key]["rate"]), f"{text}, {rates[key]['mark']}", left=0.0))
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="Planned rates over arithmetic intensity">{"".join(lines)}</svg>'
    )
    dots = _dots(roofline["operations"], gpu, scale)
    axes = f'<div class="y">{_decades(scale.low, scale.high, scale.up, "bottom", 1e12)}</div>'
    axes += f'<div class="x">{_decades(scale.left, scale.right, scale.across, "left", 1)}</div>'
    return f'<div class="plot">{picture}{"".join(named)}{dots}{axes}</div>'


def _name(across: float, up: float, text: str, left: float | None = None) -> str:
    """A name on a line about its middle, or under it from its left end."""
    shift = "-50%,50%" if left is None else ".4rem,110%"
    at = 100 * (across if left is None else left)
    return (
        f'<span class="name" style="left:{at:.2f}%;bottom:{100 * up:.2f}%;transform:translate({shift})">{text}</span>'
    )


def _dots(done: Sequence[Mapping[str, Any]], gpu: Mapping[str, Any], scale: _Scale) -> str:
    drawn, taken = [], list[tuple[float, float]]()
    order = sorted(enumerate(done, start=1), key=lambda pair: pair[1]["intensity"])
    for number, each in order:
        x, y = scale.across(each["intensity"]), scale.up(each["rate"])
        kind = " above" if _over(each, gpu) else ""
        title = escape(f"{each['name']}: {each['intensity']:,.4g} FLOP/byte, {each['rate'] / 1e12:,.4g} TFLOP/s")
        drawn.append(f'<span class="dot{kind}" style="{_place(x, y)}" title="{title}"></span>')
        above = _free(x, y + _APART[1], taken)
        taken.append((x, above))
        drawn.append(f'<span class="tag{kind}" style="{_place(x, above)}" title="{title}">{number}</span>')
    return "".join(drawn)


def _free(x: float, y: float, taken: Iterable[tuple[float, float]]) -> float:
    """The lowest height from `y` up at which a number at `x` meets no other."""
    near = sorted(height for across, height in taken if abs(across - x) < _APART[0])
    for height in near:
        if abs(height - y) < _APART[1]:
            y = height + _APART[1]
    return y


def _place(x: float, y: float) -> str:
    return f"left:{100 * x:.2f}%;bottom:{100 * y:.2f}%"


def _grid(scale: _Scale) -> str:
    rates = (_HEIGHT * (1 - scale.up(rate)) for rate in _powers(scale.low, scale.high))
    sides = (_WIDTH * scale.across(each) for each in _powers(scale.left, scale.right))
    return "".join(f"M0,{y:.1f}H{_WIDTH}" for y in rates) + "".join(f"M{x:.1f},0V{_HEIGHT}" for x in sides)


def _powers(low: float, high: float) -> list[float]:
    return [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def _decades(low: float, high: float, share: Any, side: str, unit: float) -> str:
    return "".join(
        f'<span style="{side}:{100 * share(power):.2f}%">{power / unit:,g}</span>' for power in _powers(low, high)
    )
