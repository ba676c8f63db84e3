"""A directory is replaced whole or not at all."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from undertow.checkpoint import publish
from undertow.checkpoint.publish import previous_of, replacing
from undertow.config.errors import InputError, UndertowError


def put(target: Path, text: str) -> None:
    with replacing(target) as fresh:
        (fresh / "config.json").write_text(text)


def held(target: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(target.iterdir())}


@pytest.mark.parametrize("exchange", [True, False])
def test_new_then_replaced(exchange: bool, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    put(target, "first")
    put(target, "second")
    assert held(target) == {"config.json": "second"} and os.listdir(target.parent) == ["model"]


def test_tokenizer_and_readme_stay_weights_do_not(target: Path) -> None:
    put(target, "first")
    for name in ("tokenizer.json", "README.md", "LICENSE", "model.safetensors", "model-00001-of-00002.safetensors"):
        (target / name).write_text(name)
    put(target, "second")
    kept = {name: name for name in ("LICENSE", "README.md", "tokenizer.json")}
    assert held(target) == {"config.json": "second", **kept}


def test_an_error_inside_leaves_the_old_one(target: Path) -> None:
    put(target, "first")
    with pytest.raises(ValueError, match="midway"), replacing(target) as fresh:
        (fresh / "config.json").write_text("half")
        raise ValueError("midway")
    assert held(target) == {"config.json": "first"} and os.listdir(target.parent) == ["model"]


def test_a_failing_write_is_told_and_leaves_the_old_one(target: Path) -> None:
    put(target, "first")
    message = r"cannot be written .*No space left.*; what was there is untouched"
    with pytest.raises(UndertowError, match=message) as caught, replacing(target):
        raise OSError(28, "No space left on device")
    assert caught.value.exit_code == 1 and held(target) == {"config.json": "first"}


def test_without_exchange_a_failed_rename_is_undone(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(target, "first")
    monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    rename = os.rename

    def failing(source: Path, destination: Path) -> None:
        if ".writing-" in str(source):
            raise OSError(5, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(publish.os, "rename", failing)
    with pytest.raises(UndertowError, match="Input/output error"):
        put(target, "second")
    assert held(target) == {"config.json": "first"} and not previous_of(target).exists()


def test_nothing_foreign_is_overwritten(target: Path) -> None:
    target.mkdir()
    (target / "thesis.tex").write_text("years")
    with pytest.raises(InputError, match=r"holds 'thesis.tex', no part of a model"):
        put(target, "x")
    (target / "thesis.tex").rename(target / "tokenizer.json")
    with pytest.raises(InputError, match=r"no model directory \(no config.json\)"):
        put(target, "x")
    (target / "tokenizer.json").unlink()
    (target / "inference").mkdir()
    with pytest.raises(InputError, match="holds 'inference'"):
        put(target, "x")
    (target / "inference").rmdir()
    put(target, "x")
    assert held(target) == {"config.json": "x"}


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; a model is saved as a directory"):
        put(tmp_path / "file", "x")
    with pytest.raises(InputError, match="cannot be written"):
        put(tmp_path / "file" / "below", "x")


def test_a_link_keeps_pointing_to_the_new_model(tmp_path: Path) -> None:
    put(tmp_path / "real", "first")
    (tmp_path / "link").symlink_to("real")
    put(tmp_path / "link", "second")
    assert (tmp_path / "link").is_symlink() and held(tmp_path / "real") == {"config.json": "second"}


def test_leftovers_of_killed_saves_are_swept_running_ones_are_not(target: Path) -> None:
    finished = os.fork()
    if finished == 0:
        os._exit(0)
    os.waitpid(finished, 0)
    dead = target.with_name(f".model.writing-{socket.gethostname()}-{finished}-0")
    running = target.with_name(f".model.writing-{socket.gethostname()}-{os.getppid()}-0")
    elsewhere = target.with_name(".model.writing-otherhost-1-0")
    for path in (dead, running, elsewhere):
        path.mkdir()
    put(target, "x")
    assert not dead.exists() and running.exists() and elsewhere.exists()


def test_the_working_directory_is_not_taken_away(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target.mkdir()
    monkeypatch.chdir(target)
    for name in (Path("."), target):
        with pytest.raises(InputError, match=r"is the working directory, .*; name another directory"), replacing(name):
            pass
    assert list(target.iterdir()) == []
