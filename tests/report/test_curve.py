"""Curves: where points lie, gaps, and how many are drawn."""

import pytest

from undertow.report.curve import curve


def test_a_curve_spans_its_axes():
    drawn = curve({"batch": [(1, 8.0), (3, 4.0)]}, "step", "nats", {"held out": [(2, 6.0)]})
    assert 'points="44.0,44.0 676.0,236.0"' in drawn
    assert '<circle cx="360.0" cy="140.0" r="4"><title>held out: 6 at 2</title>' in drawn
    assert "nats: 4 to 8" in drawn and "step 1 to 3" in drawn and "batch, held out" in drawn


def test_values_that_are_missing_or_not_finite_are_gaps():
    drawn = curve({"a": [(1, 2.0), (2, None), (3, float("nan")), (4, float("inf")), (5, 1.0)]}, "step", "nats")
    assert 'points="44.0,44.0 676.0,236.0"' in drawn


def test_one_point_and_none():
    assert "44.0,236.0" in curve({"a": [(1, 2.0)]}, "step", "nats")
    with pytest.raises(ValueError, match="at least one point"):
        curve({"a": [(1, None)]}, "step", "nats")


def test_names_are_text():
    assert "&lt;b&gt;" in curve({"<b>": [(1, 2.0)]}, "step", "nats")


def test_a_long_line_is_thinned_to_its_ends():
    drawn = curve({"a": [(n, float(n)) for n in range(10_001)]}, "step", "nats")
    points = drawn.split('points="')[1].split('"')[0].split()
    assert len(points) == 800 and points[0] == "44.0,236.0" and points[-1] == "676.0,44.0"
