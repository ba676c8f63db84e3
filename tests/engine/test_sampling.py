import numpy as np
import pytest

from undertow.config.errors import InputError
from undertow.engine.sampling import SamplingParams


def test_defaults_are_deepseeks():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (64, 1.0, 1.0, 0)
    assert (params.seed, params.stop, params.stop_token_ids, params.ignore_eos) == (None, (), (), False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 3),
        ("stop_token_ids", None),
        ("stop", None),
        ("stop", b"end"),
        ("max_tokens", 2**63),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
    ],
)
def test_a_refusal_names_field_and_value(field: str, value: object):
    with pytest.raises(InputError) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    shown = value[0] if isinstance(value, tuple) else value
    assert f"sampling parameter {field}={shown!r}:" in str(error.value)


def test_the_ends_of_the_ranges_are_allowed():
    SamplingParams(max_tokens=1, temperature=0, top_p=1, top_k=1, seed=0)
    SamplingParams(seed=2**64 - 1, temperature=1e-9, top_p=1e-9)


def test_one_stop_text_need_not_be_a_tuple():
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]


def test_every_field_is_documented():
    assert all(f.metadata["help"] for f in SamplingParams.__dataclass_fields__.values())


def test_numbers_of_too_many_digits():
    with pytest.raises(InputError, match=r"temperature=10{99}\.\.\.: give a finite number$"):
        SamplingParams(temperature=10**400)
    with pytest.raises(InputError, match="max_tokens=a int of too many digits: give a whole number"):
        SamplingParams(max_tokens=10**5000)


def test_whole_numbers_of_numpy_are_whole_numbers():
    params = SamplingParams(max_tokens=np.int64(3), seed=np.uint64(7), stop_token_ids=np.array([4, 5]))  # type: ignore[arg-type]
    assert (params.max_tokens, params.seed, params.stop_token_ids) == (3, 7, (4, 5))
    assert [type(value) for value in (params.max_tokens, params.seed, *params.stop_token_ids)] == [int] * 4
