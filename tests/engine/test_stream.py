from hypothesis import given
from hypothesis import strategies as st

from tests.engine.bytelevel import FIRST_BYTE, LONGER, VOCABULARY, ids_of, tokenizer
from undertow.engine.sampling import SamplingParams
from undertow.engine.stream import Chunk, OutputStream

EOS = 1


def follow(ids: list[int], params: SamplingParams, text: bool = True, ends: tuple[int, ...] = (EOS,)) -> list[Chunk]:
    output = OutputStream(params, ends, tokenizer() if text else None)
    chunks = []
    for number, token in enumerate(ids):
        chunks.append(output.push(token, -float(number)))
        if output.finish_reason is not None:
            break
    return chunks


def summary(chunks: list[Chunk]) -> tuple[str, list[int], str | None]:
    return "".join(c.text for c in chunks), [t for c in chunks for t in c.token_ids], chunks[-1].finish_reason


def test_the_test_tokenizer_is_what_it_says():
    assert tokenizer().vocab_size == VOCABULARY
    assert tokenizer().encode("tö") == ids_of("t", "ö")
    assert tokenizer().decode([0, *ids_of("to", " ", "be"), 1]) == "to be"


def test_length_is_the_reason_at_the_last_token_allowed():
    assert summary(follow(ids_of("abcdef"), SamplingParams(max_tokens=3))) == ("abc", ids_of("abc"), "length")


def test_the_end_of_sequence_is_an_id_but_no_text():
    ids = [*ids_of("to", " "), EOS, *ids_of("be")]
    assert summary(follow(ids, SamplingParams())) == ("to ", ids[:3], "stop")


def test_a_stop_token_is_an_id_but_no_text():
    ids = ids_of("to", "!?", "be")
    assert summary(follow(ids, SamplingParams(), ends=(EOS, ids[1]))) == ("to", ids[:2], "stop")


def test_text_ids_and_logprobs_end_at_the_token_that_completes_the_stop():
    ids = ids_of("to", "be", "or not", "END", "be")
    chunks = follow(ids, SamplingParams(stop=("beor",)))
    assert summary(chunks) == ("to", ids[:3], "stop")
    assert [c.text for c in chunks] == ["to", "", ""]
    assert [v for c in chunks for v in c.logprobs] == [0.0, -1.0, -2.0]


def test_a_stop_completed_by_the_last_token_allowed_is_a_stop():
    assert summary(follow(ids_of("to", "END"), SamplingParams(max_tokens=2, stop=("END",)))) == (
        "to",
        ids_of("to", "END"),
        "stop",
    )


def test_held_text_is_given_at_the_end():
    chunks = follow(ids_of("to", "be"), SamplingParams(max_tokens=2, stop=("bed",)))
    assert [c.text for c in chunks] == ["to", "be"]
    assert summary(follow([*ids_of("be"), EOS], SamplingParams(stop=("bed",)))) == ("be", [*ids_of("be"), EOS], "stop")


def test_a_character_comes_whole():
    chunks = follow(ids_of("한", "😀"), SamplingParams(max_tokens=7))
    assert [c.text for c in chunks] == ["", "", "한", "", "", "", "😀"]


def test_an_end_inside_a_character_is_shown_as_such():
    assert summary(follow(ids_of("한")[:2], SamplingParams(max_tokens=2)))[0] == "\ufffd"
    assert summary(follow([*ids_of("한")[:2], EOS], SamplingParams(stop=("\ufffd",)))) == (
        "",
        [*ids_of("한")[:2], EOS],
        "stop",
    )


def test_without_a_tokenizer_there_are_ids_alone():
    assert summary(follow([5, 6, 7], SamplingParams(max_tokens=3), text=False)) == ("", [5, 6, 7], "length")


def test_ids_of_a_padded_vocabulary_have_no_text():
    ids = [*ids_of("to"), VOCABULARY + 5, *ids_of("be")]
    assert summary(follow(ids, SamplingParams(max_tokens=3))) == ("tobe", ids, "length")


ids_strategy = st.lists(
    st.integers(0, 7).map(lambda i: ids_of("t", "o", "b", "ö", *LONGER)[i]) | st.integers(FIRST_BYTE, VOCABULARY - 1),
    max_size=20,
)


@given(ids_strategy, st.lists(st.sampled_from(["to", "ot", "beto", "öt", "tor", "END", "\ufffd"]), max_size=3))
def test_the_text_is_that_of_all_ids_cut_before_the_first_stop(ids: list[int], stops: list[str]):
    params = SamplingParams(max_tokens=len(ids) + 1, stop=tuple(stops))
    text, seen, reason = summary(follow([*ids, EOS], params))
    whole = tokenizer().decode(seen)
    starts = [whole.find(stop) for stop in stops if stop in whole]
    if starts:
        assert whole.startswith(text) and len(text) in starts and reason == "stop"
        # No earlier token completed a stop.
        assert not any(stop in tokenizer().decode(seen[:-1]).rstrip("\ufffd") for stop in stops)
    else:
        assert text == whole and seen == [*ids, EOS]
