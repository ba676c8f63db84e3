"""Numbers as text."""

import pytest

from undertow.report.quantity import billions, both, ceiling, significant, words


def test_bytes_in_both_units():
    assert both(261_900_000_000) == "261.9 GB (243.9 GiB)" and both(4_096_000) == "0.004 GB (0.004 GiB)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (8.5524, "8.552"), (65.1211, "65.12"), (1234.5, "1,234"), (123456.7, "123,457")),
        *((0.02087, "0.02087"), (0.0009162, "0.0009162"), (9.99996, "10.000")),
    ],
)
def test_significant_figures(value, text):
    assert significant(value) == text


def test_parameters_and_names():
    assert [billions(count) for count in (290_939_000_000, 560_000, 4_216)] == ["290.94 B", "0.56 M", "4,216"]
    assert words("csa_compressors") == "CSA compressors" and words("mtp") == "MTP"


def test_where_a_picture_ends():
    assert ceiling(100, [50, 80]) == 104 and ceiling(100, [200]) == 208 and ceiling(100, [2]) == 2.08
