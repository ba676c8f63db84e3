"""Finding recipes by path and by name."""

import pytest

from undertow.config.errors import ConfigError
from undertow.config.paths import recipe_folders, recipe_names, recipe_path


def test_names_of_shipped_recipes():
    assert {"pretrain/quickstart", "pretrain/small"} <= set(recipe_names())


def test_name_with_and_without_suffix(write):
    expected = recipe_folders()[-1] / "pretrain" / "quickstart.yaml"
    assert recipe_path("pretrain/quickstart") == recipe_path("pretrain/quickstart.yaml") == expected


def test_file_wins_over_a_shipped_recipe_of_that_name(write):
    path = write("pretrain/quickstart.yaml", "model: v4-tiny\n")
    assert recipe_path("pretrain/quickstart.yaml").resolve() == path.resolve()
    assert recipe_path(path) == path


def test_unknown_name_is_refused_with_the_nearest(write):
    with pytest.raises(ConfigError) as error:
        recipe_path("pretrain/quikstart")
    assert str(error.value) == (
        "no recipe file or name 'pretrain/quikstart'; did you mean 'pretrain/quickstart'? "
        f"(shipped recipes: {', '.join(recipe_names())})"
    )
    with pytest.raises(ConfigError, match=r"^no recipe file or name 'runs/x\.yaml' \(shipped recipes: "):
        recipe_path("runs/x.yaml")


def test_folder_is_refused(write, tmp_path):
    with pytest.raises(ConfigError, match=r"^recipe 'sub' is a folder; name a \.yaml file in it$"):
        recipe_path(write("sub/a.yaml", "").parent)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 5000, f"no recipe file or name '{'x' * 199}... (5002 characters)"),
        ("a\0b", "recipe: text holds the character \\u0000, which UTF-8 files and paths cannot"),
        ("", "the name of the recipe is empty: "),
    ],
)
def test_a_name_that_no_file_can_have(name, message):
    with pytest.raises(ConfigError) as error:
        recipe_path(name)
    assert str(error.value).startswith(message)
