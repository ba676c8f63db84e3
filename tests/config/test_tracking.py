"""What counts as reading a key."""

import pytest

from undertow.config.resolve import resolve
from undertow.config.tracking import Tracked


@pytest.fixture
def view():
    return Tracked(resolve(None, ["model=v4-debug", "ops.linear=triton"], {}).config)


def test_passing_a_section_on_reads_nothing(view):
    train = view.train
    assert view.reads == set()
    assert train.steps == 300
    assert view.reads == {"train.steps"}
    assert (view.was_read("train.steps"), view.was_read("train.beta1"), view.was_read("train")) == (True, False, False)


def test_views_of_one_section_share_their_record(view):
    assert (view.train.steps, view.train.beta1, view.seed) == (300, 0.9, 0)
    assert view.reads == {"train.steps", "train.beta1", "seed"}


def test_a_whole_value_is_read_with_all_below(view):
    assert view.ops == {"linear": "triton"}
    assert view.model.hidden_size == 64
    assert view.was_read("ops.linear")
    assert view.was_read("model.rope_scaling.factor") and view.was_read("model.preset")
    assert not view.was_read("modell")


def test_methods_are_not_readings(view):
    assert view.train.model_dump()["steps"] == 300
    assert view.reads == set()


def test_unknown_attribute(view):
    with pytest.raises(AttributeError):
        _ = view.train.stepz
    assert view.reads == set()
