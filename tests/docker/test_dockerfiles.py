"""What the Dockerfiles name is there: files, extras, and a torch that the package allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def test_there_is_one_for_each_maker():
    assert [file.name for file in FILES] == ["cuda.Dockerfile", "rocm.Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_says_first_that_it_is_not_built(file: Path):
    assert file.read_text().splitlines()[0] == "# not built in our checks"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_everything_copied_is_there_and_let_through(file: Path):
    lines = re.findall(r"^COPY (.+)$", file.read_text(), re.MULTILINE)
    copied = {source for line in lines for source in line.split()[:-1]}
    assert {"pyproject.toml", "undertow", "recipes"} <= copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    let_through = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert let_through == copied


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_the_build_reads_is_copied(file: Path):
    copied = re.findall(r"^COPY (.+)$", file.read_text(), re.MULTILINE)
    needed = [
        PROJECT["readme"],
        *PROJECT["license-files"],
        *PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"],
    ]
    assert [name for name in needed if not any(name in line.split() for line in copied)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_extras_are_those_of_the_package(file: Path):
    (extras,) = re.findall(r'pip install [^"\n]*"\.\[(.+)\]"', file.read_text())
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert ("gpu" in extras.split(",")) is (file.stem == "cuda")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_torch_is_one_that_the_package_allows(file: Path):
    (version,) = re.findall(r"^ARG TORCH=(.+)$", file.read_text(), re.MULTILINE)
    torch = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert torch.specifier.contains(version)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_base_and_index_are_of_the_same_release(file: Path):
    text = file.read_text()
    (base,), (index,) = (
        re.findall(r"^ARG BASE=.+?:(\d+\.\d+)", text, re.M),
        re.findall(r"^ARG TORCH_INDEX=.+/(.+)", text, re.M),
    )
    assert index in (f"cu{base.replace('.', '')}", f"rocm{base}")
