"""Where recipes lie: a path, or a name such as `pretrain/quickstart` among the recipes that are shipped."""

from __future__ import annotations

import os
from pathlib import Path

from undertow.config.document import is_file, place
from undertow.config.errors import ConfigError
from undertow.config.presets import nearest
from undertow.config.scalars import plain, told


def recipe_folders() -> list[Path]:
    """Folders of shipped recipes that exist: that of the installed package, then that of the repository."""
    package = Path(__file__).resolve().parents[1]
    return [folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir()]


def recipe_names() -> list[str]:
    """Names of all shipped recipes, sorted."""
    folders = recipe_folders()
    return sorted({file.relative_to(d).with_suffix("").as_posix() for d in folders for file in d.rglob("*.yaml")})


def shipped_recipe(name: str) -> Path | None:
    """The file of a shipped recipe by its name, with or without `.yaml`; None if there is none."""
    path = Path(name)
    stem = path.with_suffix("").as_posix() if path.suffix == ".yaml" else path.as_posix()
    files = (folder / f"{stem}.yaml" for folder in recipe_folders())
    return next((file for file in files if is_file(file)), None)


def recipe_path(name: str | Path) -> Path:
    """The file of a recipe given as a path, or by its name with or without `.yaml`.

    Raises `ConfigError`, listing the shipped recipes and naming the nearest, if there is none.
    """
    plain(str(name), "recipe")
    if not str(name):
        raise ConfigError("the name of the recipe is empty: give a .yaml file or the name of a shipped recipe")
    path = Path(name)
    if is_file(path):
        return path
    if os.path.isdir(path):  # unlike Path.is_dir, it takes a name that is too long for a folder
        raise ConfigError(f"recipe '{place(path)}' is a folder; name a .yaml file in it")
    if file := shipped_recipe(str(path)):
        return file
    names = recipe_names()
    near = nearest(path.as_posix().removesuffix(".yaml"), names)
    shipped = f"(shipped recipes: {', '.join(names) or 'none'})"
    raise ConfigError(f"no recipe file or name {told(str(name))}{near} {shipped}")
