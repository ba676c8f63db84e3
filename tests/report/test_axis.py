"""Axes: few round ticks, and numbers that tell them apart."""

import pytest

from undertow.report.axis import axis


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1, 320], ["100", "200", "300"]),
        ([0, 1_000_000], ["0", "200,000", "400,000", "600,000", "800,000", "1,000,000"]),
        ([4.2, 7.8], ["5", "6", "7"]),
        ([0.95, 1.21], ["1.0", "1.1", "1.2"]),
        ([0.0002, 0.003], ["0.001", "0.002", "0.003"]),
        ([0.0, 2.7e-6], ["0", "1e-06", "2e-06"]),
        ([0.0, 4e8], ["0", "1e+08", "2e+08", "3e+08", "4e+08"]),
        ([0.0, 1.2e7], ["0", "5.0e+06", "1.0e+07"]),
        ([-3, 3], ["-2", "0", "2"]),
    ],
)
def test_ticks_are_round(values, labels):
    assert axis(values).labels == labels


def test_a_widened_axis_ends_at_ticks():
    up = axis([4.2, 7.8], widened=True)
    assert (up.low, up.high, up.ticks) == (4, 8, [4, 5, 6, 7, 8])
    assert up.share(5.0) == 0.25
    narrow = axis([4.2, 7.8])
    assert (narrow.low, narrow.high) == (4.2, 7.8)


def test_one_value_stands_in_the_middle():
    for value in (0.0, 3.0, -3.0, 1e-4):
        assert axis([value, value]).share(value) == pytest.approx(0.5)
        assert len(axis([value], widened=True).ticks) > 2


def test_whole_numbers_have_whole_ticks():
    assert axis([1, 3], least=1.0).labels == ["1", "2", "3"]
    assert axis([7], least=1.0).labels == ["4", "6", "8", "10"]
