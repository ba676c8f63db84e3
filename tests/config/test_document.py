"""One recipe file: positions, and everything that can be wrong with it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undertow.config.document import place, read_document
from undertow.config.errors import ConfigError
from undertow.config.layer import SECTION


def test_every_key_knows_its_line(write):
    path = write(
        "r/a.yaml",
        """
        # a comment
        model: v4-tiny

        train:
          steps: 0x10
          learning_rate: 3e-4
          name: 'quoted'
        list:
          - 1
          - two
        flow: {x: 1, y: [true, null]}
        """,
    )
    layer = read_document(path, {})
    found = {key: (entry.value, entry.source) for key, entry in layer.items() if entry.value is not SECTION}
    assert found == {
        "model.preset": ("v4-tiny", "r/a.yaml:2"),
        "train.steps": (16, "r/a.yaml:5"),
        "train.learning_rate": (3e-4, "r/a.yaml:6"),
        "train.name": ("quoted", "r/a.yaml:7"),
        "list": ([1, "two"], "r/a.yaml:8"),
        "flow.x": (1, "r/a.yaml:11"),
        "flow.y": ([True, None], "r/a.yaml:11"),
    }
    assert layer["train"].source == "r/a.yaml:4"
    assert [type(found[key][0]) for key in ("train.steps", "train.learning_rate", "train.name")] == [int, float, str]


def test_anchors_and_merge_keys(write):
    layer = read_document(write("a.yaml", "x: &base {a: 1, b: 2}\ny:\n  <<: *base\n  b: 3\n"), {})
    assert (layer["y.a"].value, layer["y.b"].value) == (1, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 'a.yaml:3: repeated key "a" with value "3" (original value: "1")'),
        ("t:\n  a: 1\n  a: 2\n", 'a.yaml:3: repeated key "a" with value "2" (original value: "1")'),
        ("a: [1,\nb: 2\n", "a.yaml:3: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got"),
        ("a: 1\n b: 2\n", "a.yaml:2: not valid YAML: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2\n", "a.yaml:2: not valid YAML: expected a single document in the stream"),
        ("a: 1\nb: \x07\n", "a.yaml:2: not valid YAML: character 7 is not allowed"),
        ("- 1\n", "a.yaml:1: a recipe is a mapping of keys, but this file holds a list"),
        ("text\n", "a.yaml:1: a recipe is a mapping of keys, but this file holds a single value"),
        ("# empty\n", "a.yaml:1: a recipe is a mapping of keys, but this file holds nothing"),
        ("a: 1\nb: 2024-01-01\n", "a.yaml:2: b: a date is not allowed here; quote it if text was meant"),
        ("t:\n  a: !x 1\n", "a.yaml:2: t.a: a tagged value is not allowed here; quote it if text was meant"),
        ("a: [{b: 1}]\n", "a.yaml:1: a: a mapping is not allowed here; quote it if text was meant"),
        (
            "train.steps: 3\n",
            "a.yaml:1: key 'train.steps' cannot stand here: nest it below its section, for no name has ",
        ),
        ("t:\n  1: 3\n", "a.yaml:2: key '1' cannot stand here: keys are text"),
    ],
)
def test_bad_files_are_refused_in_one_line(write, text, message):
    with pytest.raises(ConfigError) as error:
        read_document(write("a.yaml", text), {})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_unreadable_files(write, tmp_path):
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"^b\.yaml: cannot read this recipe: it is not UTF-8 text$"):
        read_document(tmp_path / "b.yaml", {})
    with pytest.raises(ConfigError, match=r"^c\.yaml: cannot read this recipe: No such file or directory$"):
        read_document(tmp_path / "c.yaml", {})


def test_place_outside_the_working_directory_is_whole(write, tmp_path):
    assert place(tmp_path.parent / "x.yaml") == str(tmp_path.parent / "x.yaml")
    assert place(tmp_path / "sub" / ".." / "x.yaml") == "x.yaml"


@given(st.one_of(st.text(alphabet="abm:-[]{}&*!|>'\"%@`#?,\n \t<~01.$=\\", max_size=40), st.text(max_size=30)))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_makes_it_crash(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        read_document(path, {})
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


def test_absurdly_deep_nesting_is_one_line(tmp_path):
    recipe = tmp_path / "deep.yaml"
    recipe.write_text("train: " + "[" * 20000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_document(recipe, {})


@pytest.mark.parametrize("value", ["2001-99-99", "2001-01-01T99:99:99", "0x_", "1" * 5000, "[2001-99-99]", "!!int a"])
def test_an_impossible_scalar_names_its_line(write, value):
    with pytest.raises(ConfigError) as error:
        read_document(write("a.yaml", f"x: 1\ny: {value}\n"), {})
    assert str(error.value) == (
        "a.yaml:2: not valid YAML: this value looks like a number, a date or a tag and is none; "
        "quote it if text was meant"
    )


def test_a_boolean_with_an_anchor_stays_a_boolean(write):
    assert read_document(write("a.yaml", "x: &x true\ny: *x\n"), {})["y"].value is True


def test_a_variable_that_no_key_takes(write):
    with pytest.raises(ConfigError) as error:
        read_document(write("a.yaml", "x: ${V}\n"), {"V": "[2020-01-01]"})
    assert str(error.value) == "a.yaml:1: ${V}: a date is not allowed here; quote it if text was meant"
