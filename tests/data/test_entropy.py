import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.config.errors import InputError
from undertow.data.entropy import bigram_entropy, unigram_entropy


def test_unigrams_by_hand():
    assert unigram_entropy("aaaa") == 0
    assert unigram_entropy("abab") == pytest.approx(math.log(2))
    assert unigram_entropy("aaab") == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert unigram_entropy("é") == pytest.approx(math.log(2))  # two different bytes
    assert unigram_entropy(bytes(range(256))) == pytest.approx(math.log(256))


def test_bigrams_by_hand():
    assert bigram_entropy("ababab") == pytest.approx(0, abs=1e-12)  # each byte is certain given the one before
    assert bigram_entropy("aaba") == pytest.approx(2 / 3 * math.log(2))  # after a: a or b; after b: a
    assert bigram_entropy("aabba") == pytest.approx(math.log(2))


@given(st.binary(min_size=2, max_size=200))
def test_knowing_the_byte_before_never_costs(data: bytes):
    assert -1e-12 <= bigram_entropy(data) <= unigram_entropy(data[1:]) + 1e-12


def test_too_short_a_text_is_refused():
    with pytest.raises(InputError, match="0 bytes"):
        unigram_entropy("")
    with pytest.raises(InputError, match="needs at least 2"):
        bigram_entropy("a")
