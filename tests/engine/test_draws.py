from statistics import fmean

from undertow.engine.draws import Draws


def test_a_number_depends_on_seed_and_index_alone():
    again = Draws(7)
    later = [again.uniform(i) for i in (5, 0, 3)]
    first = [Draws(7).uniform(i) for i in range(6)]
    assert later == [first[5], first[0], first[3]]


def test_pinned_values_survive_releases_and_machines():
    assert Draws(0).uniform(0) == 0.12311943861730146
    assert Draws(2**64 - 1).uniform(10**6) == 0.9469133580913053


def test_uniform_over_indices_and_over_seeds():
    for numbers in ([Draws(3).uniform(i) for i in range(4000)], [Draws(s).uniform(0) for s in range(4000)]):
        counts = [0] * 10
        for number in numbers:
            assert 0.0 <= number < 1.0
            counts[int(number * 10)] += 1
        # Chi-square with 9 degrees of freedom: 27.9 is passed once in a thousand.
        assert sum((c - 400) ** 2 / 400 for c in counts) < 27.9
    pairs = [Draws(3).uniform(i) * Draws(4).uniform(i) for i in range(4000)]
    assert abs(fmean(pairs) - 0.25) < 0.015


def test_no_seed_is_a_fresh_one():
    assert Draws.of(None) != Draws.of(None)
    assert Draws.of(9) == Draws(9)
    assert Draws.of(0) == Draws(0)
