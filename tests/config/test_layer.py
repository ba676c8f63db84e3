"""How layers are filled and merged."""

from undertow.config.layer import SECTION, Entry, Layer, Rank, flat, merge, nested, put


def layer(rank: Rank = Rank.FILE, source: str = "s", **keys) -> Layer:
    filled: Layer = {}
    for key, value in keys.items():
        put(filled, key.replace("__", "."), Entry(value, source, rank))
    return filled


def test_sections_join_and_lists_are_replaced():
    merged = merge([layer(a__x=1, a__y=[1, 2, 3], b=1), layer(a__y=[4], a__z=5)])
    assert nested(merged) == {"a": {"x": 1, "y": [4], "z": 5}, "b": 1}


def test_later_source_goes_with_the_later_value():
    merged = merge([layer(source="old", a__x=1, a__y=1), layer(source="new", a__x=2)])
    assert (merged["a.x"].source, merged["a.y"].source) == ("new", "old")


def test_value_replaces_a_section_and_a_section_a_value():
    assert nested(merge([layer(a__x__y=1, ab=2), layer(a=3)])) == {"a": 3, "ab": 2}
    assert nested(merge([layer(a=3), layer(a__x=1)])) == {"a": {"x": 1}}


def test_null_is_a_value():
    assert nested(merge([layer(a__x=1), layer(a__x=None)])) == {"a": {"x": None}}


def test_higher_rank_wins_whatever_the_order():
    low, high = layer(Rank.FILE, x=1), layer(Rank.ENVIRONMENT, x=2)
    assert nested(merge([low, high])) == nested(merge([high, low])) == {"x": 2}


def test_model_by_name_is_its_preset():
    assert layer(model="v4-tiny")["model.preset"].value == "v4-tiny"
    assert layer(model="v4-tiny")["model"].value is SECTION


def test_within_one_layer_a_value_ends_the_section_it_replaces():
    assert nested(layer(a__x=1, a=2)) == {"a": 2}
    assert nested(layer(a=2, a__x=1)) == {"a": {"x": 1}}


def test_flat_keeps_empty_mappings_and_lists():
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
