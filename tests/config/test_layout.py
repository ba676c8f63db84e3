"""The layout language: what it spells, its one canonical spelling, and every refusal word for word."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.config.errors import ConfigError
from undertow.config.layout import Layout, check_layout, layout_of, parse_layout, place
from undertow.config.model import ModelConfig

FLASH = ModelConfig.from_preset("v4-flash")
STAGES = ("E" + "t" * 10, "t" * 12, "t" * 12, "t" * 9 + "mL")


@pytest.mark.parametrize(
    "spelling",
    [
        "Et*10|t*12|t*12|t*9mL",
        "Et*10|(t*12|)*2t*9mL",
        "E,t*10,|,t*12|t*12|,t*9,m,L,",
        "Etttttttttt|(tttttt)*2|(tt)*6|t*4t*5m*1L",
        "E(t*5)*2(|t*12)*2|t*9mL",
        "Et*0,10|t*012|t*1,2|t*9mL",
    ],
)
def test_spellings_of_one_layout(spelling):
    layout = parse_layout(spelling)
    assert layout.stages == STAGES
    assert str(layout) == "Et*10|t*12|t*12|t*9mL"
    assert layout == layout_of((10, 12, 12, 9))


def test_list_form():
    lists = [["embedding", "decoder"], ["decoder", "decoder"], ["mtp", "loss"]]
    assert str(parse_layout(lists)) == "Et|t*2|mL"
    assert parse_layout("Et|t*2|mL").lists() == lists


def test_stages_know_their_layers():
    layout = parse_layout("Et*10|t*12|t*12|t*9|mL")
    assert [layout.layers(s) for s in range(5)] == [
        range(0, 10), range(10, 22), range(22, 34), range(34, 43), range(43, 43)
    ]  # fmt: skip
    assert [[*layout.mtp_blocks(s)] for s in range(5)] == [[], [], [], [], [43]]
    assert layout.counts("t") == (10, 12, 12, 9, 0)


# A spelling, and by plain substitution what it stands for.
letters = st.one_of(st.just("t"), st.integers(1, 12).map(lambda n: f"t*{n}"), st.just(","))
runs = st.lists(letters, max_size=4).map("".join)
groups = st.tuples(st.lists(st.one_of(runs, st.just("t|")), min_size=1, max_size=3).map("".join), st.integers(1, 3))
pieces = st.one_of(runs, st.just("|"), groups.map(lambda g: f"({g[0]})*{g[1]}"))
spellings = st.tuples(
    st.lists(pieces, max_size=6).map("".join), st.sampled_from(["L", "mL", "m|L", "|m*2L", "|mL"])
).map(lambda parts: "E" + parts[0] + parts[1])


def written_out(spelling: str) -> str:
    plain = spelling.replace(",", "")
    plain = re.sub(r"\(([^()]*)\)\*(\d+)", lambda group: group[1] * int(group[2]), plain)
    return re.sub(r"(\w)\*(\d+)", lambda run: run[1] * int(run[2]), plain)


@settings(max_examples=300, deadline=None)
@given(spellings)
def test_what_a_spelling_stands_for(spelling):
    stages = tuple(written_out(spelling).split("|"))
    if "" in stages or "()" in spelling.replace(",", ""):
        with pytest.raises(ConfigError):
            parse_layout(spelling)
    else:
        assert parse_layout(spelling).stages == stages


layouts = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2)).map(
    lambda x: layout_of(*x)
)


@settings(max_examples=200, deadline=None)
@given(layouts)
def test_printing_and_parsing_are_inverse(layout: Layout):
    assert parse_layout(str(layout)) == layout
    assert parse_layout(layout.lists()) == layout


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="EtmL|*(),0123x ", max_size=14))
def test_any_text_is_a_layout_or_refused_in_one_line(text):
    try:
        layout = parse_layout(text)
    except ConfigError as refusal:
        assert str(refusal).startswith("layout '") and "\n" not in str(refusal)
    else:
        assert parse_layout(str(layout)) == layout
        assert str(parse_layout(str(layout))) == str(layout)


NOTHING = "'*' repeats the one letter or the group before it; nothing to repeat stands here"
EMPTY = "the stage that ends here is empty; a stage has at least one of E, t, m, L"
FIRST = "the embedding E stands once, as the very first item"
LAST = "the loss L stands once, as the very last item"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "layout '' is empty; it is written such as Et*10|t*12|t*12|t*9mL"),
        ("Et*4|d*4L", "layout 'Et*4|d*4L', column 6: 'd' is none of the letters E, t, m, L nor of the signs | * ( ) ,"),
        ("Et t L", "layout 'Et t L', column 3: ' ' is none of the letters E, t, m, L nor of the signs | * ( ) ,"),
        ("*3EtL", f"layout '*3EtL', column 1: {NOTHING}"),
        ("Et|*2tL", f"layout 'Et|*2tL', column 4: {NOTHING}"),
        ("Et*2*3L", f"layout 'Et*2*3L', column 5: {NOTHING}"),
        ("Et*|tL", "layout 'Et*|tL', column 4: '*' is followed by a number of at least 1; no number stands here"),
        ("Et*0L", "layout 'Et*0L', column 4: '*' is followed by a number of at least 1; 0 was given"),
        ("Et*20000L",
         "layout 'Et*20000L', column 2: repeated 20000 times is more than the 10000 items that a layout may have"),
        ("Et*99999999L", "layout 'Et*99999999L', column 4: a layout has at most 10000 items; a number of 8 digits"),
        ("E(t|(t)*2)*2L", "layout 'E(t|(t)*2)*2L', column 5: a group inside the group of column 2; groups do not nest"),
        ("E(t|tL", "layout 'E(t|tL', column 2: the group is not closed; a group is written (...)*n"),
        ("Et)*2L", "layout 'Et)*2L', column 3: ')' closes no group; a group is written (...)*n"),
        ("E(t|)tL", "layout 'E(t|)tL', column 6: a group is followed by '*' and how often it stands; n is at least 1"),
        ("Et()*2L", "layout 'Et()*2L', column 4: the group is empty; it repeats letters and '|'"),
        ("Et||tL", f"layout 'Et||tL', column 4: {EMPTY}"),
        ("|EtL", f"layout '|EtL', column 1: {EMPTY}"),
        ("EtL|", f"layout 'EtL|', column 5: {EMPTY}"),
        ("t|tL", f"layout 't|tL', column 1: decoder t; {FIRST}"),
        ("Et|EtL", f"layout 'Et|EtL', column 4: embedding E; {FIRST}"),
        ("Et|t", f"layout 'Et|t', column 4: decoder t; {LAST}"),
        ("EtL|tL", f"layout 'EtL|tL', column 3: loss L; {LAST}"),
        ("Et|mtL",
         "layout 'Et|mtL', column 4: an MTP block m before a decoder layer t; every m comes after the last t"),
        ("Et|tm|mL", "layout 'Et|tm|mL', column 7: an MTP block m on stage 2, others on stage 1; one stage has all"),
        ([], "layout is empty; it is written such as Et*10|t*12|t*12|t*9mL"),
        (["Et", "tL"], "layout, at [0]: a stage is a list of embedding, decoder, mtp, loss; this is 'Et'"),
        ([["embedding", "encoder"]], "layout, at [0][1]: 'encoder' is none of embedding, decoder, mtp, loss"),
        ([["embedding"], [], ["loss"]], f"layout, at [1]: {EMPTY}"),
        ([["embedding"], ["loss", "decoder"]], f"layout, at [1][0]: loss L; {LAST}"),
    ],
)  # fmt: skip
def test_refusals(text, message):
    with pytest.raises(ConfigError) as refusal:
        parse_layout(text)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("text", "ranks", "placement", "message"),
    [
        ("Et*10|t*12|t*12|t*8mL", 4, "wrap", "stages 0 to 3: 42 t (10, 12, 12, 8 by stage); the model has 43"),
        ("Et*10|t*12|t*12|t*9L", 4, "wrap", "stages 0 to 3: 0 m (0, 0, 0, 0 by stage); the model has 1"),
        ("Et*10|t*12|t*12|t*9m*2L", 4, "wrap", "stages 0 to 3: 2 m (0, 0, 0, 2 by stage); the model has 1"),
        ("Et*10|t*12|t*12|t*9mL", 3, "wrap",
         "after stage 3: 4 stages; the number of stages is a multiple of the 3 pipeline ranks"),
        ("Et*10|t*12|t*12|t*9mL", 4, "fold",
         "after stage 3: 4 stages; a folded schedule has 2 stages a rank, 8 for 4 ranks"),
        ("Et*43|m|L", 1, "wrap",
         "stage 1: m is in chunk 1 of rank 0; MTP blocks are in the last chunk of their rank, so on stages 2 to 2"),
    ],
)  # fmt: skip
def test_refusals_by_the_model(text, ranks, placement, message):
    with pytest.raises(ConfigError) as refusal:
        check_layout(parse_layout(text), FLASH, ranks, placement)
    assert str(refusal.value) == f"layout '{text}', {message}"


def test_chunks_of_a_layout():
    assert check_layout(parse_layout("Et*10|t*12|t*12|t*9mL"), FLASH, 4) == 1
    assert check_layout(parse_layout("Et*6|t*5|t*6|t*6|t*6|t*6|t*5|t*3mL"), FLASH, 4) == 2
    assert check_layout(parse_layout("Et*6|t*5|t*6|t*6|t*6|t*6|t*8m|L"), FLASH, 4, "fold") == 2
    assert check_layout(layout_of((61,)), ModelConfig.from_preset("v4-pro"), 1) == 1
    assert [place(stage, 3, "wrap") for stage in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [place(stage, 3, "fold") for stage in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]


def test_counts_leave_no_stage_empty():
    with pytest.raises(ConfigError, match=r"layers by stage \[3, 0, 4\]: stage 1 is empty; a stage has at least 1"):
        layout_of((3, 0, 4))
