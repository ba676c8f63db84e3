"""Who is named, by what the ranks last said."""

from undertow.parallel.verdict import Beat, Sighting
from undertow.parallel.verdict import verdict as judge

NUMBERS = {"all ranks": 3, "group expert": 17}


def _sight(place="forward (undertow/model/moe.py:40)", silent=0.0, still=20.0, **beat) -> Sighting:
    return Sighting(Beat(9, 4, place, NUMBERS, **beat), silent, still)


def verdict(seen, timeout) -> str | None:
    found = judge(seen, timeout)
    return found and found.sentence


def _waits(still=20.0, silent=0.0, place="backward (undertow/parallel/dispatch.py:54)") -> Sighting:
    return _sight(place, silent, still, waits="all_to_all number 18 of group expert")


def test_nobody_is_named_while_one_moves_or_all_are_at_work():
    assert verdict([_waits(), _sight(still=9.9)], 10) is None
    assert verdict([_sight(), _sight()], 10) is None
    assert verdict([_sight(done=True), _sight(done=True, silent=100)], 10) is None


def test_who_does_not_wait_is_named():
    assert verdict([_waits(), _sight(last="all_reduce number 3 of all ranks"), _waits(), _waits()], 10) == (
        "rank 1 of 4 did not move for 10 s, outside any collective: in step 5, forward (undertow/model/moe.py:40), "
        "after all_reduce number 3 of all ranks; ranks 0, 2-3 wait in all_to_all number 18 of group expert, step 5, "
        "backward (undertow/parallel/dispatch.py:54); lengthen parallel.timeout, 10 s, if that may take longer"
    )


def test_an_exchange_without_a_record_counts_as_waiting():
    told = verdict([_sight("pipeline (undertow/parallel/pipeline/edge.py:9)", blocked=True), _sight()], 10)
    assert told is not None and told.startswith("rank 1 of 2 did not move for 10 s")
    assert "; rank 0 waits in an exchange, step 5, pipeline (undertow/parallel/pipeline/edge.py:9); " in told


def test_who_gave_no_sign_of_life_is_named_even_while_others_move():
    assert verdict([_sight(still=0), _sight(silent=10.2, still=30), _sight(still=0)], 10) == (
        "rank 1 of 3 gave no sign of life for 10 s: stopped, dead or cut off; last seen in step 5, forward "
        "(undertow/model/moe.py:40), after collectives 3 of all ranks, 17 of group expert; no other rank waits in a "
        "collective yet"
    )


def test_silence_comes_before_standing_still():
    told = verdict([_waits(), _waits(silent=6, still=11)], 10)
    assert told is not None and told.startswith("rank 1 of 2 gave no sign of life for 6 s")
    told = verdict([_waits(), _waits(silent=4)], 10)
    assert told is not None and told.startswith("all ranks wait for each other for 10 s: ranks 0-1 wait in all_to_all")


def test_those_without_a_sign_of_life_are_told_apart():
    found = judge([_waits(), _sight(silent=10), _sight(silent=11)], 10)
    assert found is not None and found.lost == (1, 2)
    found = judge([_waits(), _sight()], 10)
    assert found is not None and found.lost == ()


def test_a_rank_that_never_spoke():
    assert verdict([_waits(still=5), Sighting(None, 19, 19)], 10) is None
    told = verdict([_waits(), Sighting(None, 21, 21)], 10)
    assert told is not None and "rank 1 of 2 gave no sign of life for 21 s" in told and "before its first step" in told


def test_beats_are_kept_by_their_text():
    beat = Beat(1, 2, "data", NUMBERS, last="barrier number 1 of all ranks", blocked=True)
    assert Beat.decode(beat.encode()) == beat
