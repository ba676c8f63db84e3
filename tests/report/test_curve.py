"""Curves: where points lie, gaps, numbers and names, and how many points are drawn."""

import re

import pytest

from undertow.report.curve import curve


def paths(drawn: str, kind: str) -> list[str]:
    return re.findall(rf'<path class="{kind}[^"]*" d="([^"]*)"', drawn)


def test_points_ticks_and_names():
    drawn = curve({"batch": [(1, 8.0), (3, 4.0)]}, "step", "nats", {"held out": [(2, 6.0)]})
    assert paths(drawn, "line") == ["M0.0,0.0h0L1000.0,300.0", "M500.0,150.0h0"]
    assert paths(drawn, "dot") == ["M500.0,150.0h0"]
    assert "<title>held out: 6 at 2</title>" in drawn
    assert '<span style="bottom:0.00%">4</span>' in drawn and '<span style="bottom:100.00%">8</span>' in drawn
    assert '<div class="x"><span style="left:0.00%">1</span><span style="left:50.00%">2</span>' in drawn
    assert '<figcaption>nats<span class="c0">batch</span><span class="c1">held out</span></figcaption>' in drawn
    assert 'class="line c0"' in drawn and 'class="line c1"' in drawn and 'class="dot c1"' in drawn


def test_one_name_needs_no_legend():
    drawn = curve({}, "step", "recall", {"recall": [(10, 0.5), (20, 0.75)], "never": []})
    assert "<figcaption>recall</figcaption>" in drawn


def test_values_that_are_missing_or_not_finite_break_the_line():
    for absent in (None, float("nan"), float("inf")):
        drawn = curve({"a": [(1, 2.0), (2, 1.0), (3, absent), (4, 1.0), (5, 2.0)]}, "step", "nats")
        assert paths(drawn, "line") == ["M0.0,0.0h0L250.0,300.0M750.0,300.0h0L1000.0,0.0"]
        assert "nan" not in drawn and "inf" not in drawn


def test_a_gap_at_an_end_keeps_its_width():
    drawn = curve({"a": [(1, None), (2, 1.0), (3, 2.0), (4, None), (5, None)]}, "step", "nats")
    assert paths(drawn, "line") == ["M250.0,300.0h0L500.0,0.0"]


def test_one_point_and_none():
    assert paths(curve({"a": [(1, 2.0)]}, "step", "nats"), "line") == ["M500.0,150.0h0"]
    with pytest.raises(ValueError, match="at least one point"):
        curve({"a": [(1, None)]}, "step", "nats")


def test_names_are_text():
    assert "&lt;b&gt;" in curve({"<b>": [(1, 2.0)]}, "step", "nats")


def test_a_long_line_is_thinned_and_keeps_spikes_gaps_and_ends():
    values: list[float | None] = [1.0 + n % 2 for n in range(100_001)]
    values[70_001], values[33_333], values[50_000] = 9.0, 0.0, None
    (path,) = paths(curve({"a": list(enumerate(values))}, "step", "nats"), "line")
    assert path.count("L") < 900
    assert path.count("M") == 2 and re.search(r"L\d+\.\d,\d+\.\dM500\.\d,", path)
    assert "700.0,30.0" in path and "333.3,300.0" in path  # the axis goes from 0 to 10
    assert path.startswith("M0.0,270.0") and path.endswith("L1000.0,270.0")
