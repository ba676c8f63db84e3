"""A file is there whole or not at all, whatever lies at its place and whoever else writes it."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from undertow.config.errors import InputError
from undertow.config.writing import write_file


def test_a_new_file_and_an_old_one_whose_mode_stays(tmp_path: Path):
    file = tmp_path / "a.json"
    write_file(file, "one", "no")
    assert file.read_text() == "one" and not file.stat().st_mode & 0o111
    file.chmod(0o640)
    write_file(file, (piece for piece in ("two", "\u00e9")), "no")
    assert file.read_bytes() == "two\u00e9".encode() and stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path):
    (tmp_path / "far").mkdir()
    link, missing = tmp_path / "link", tmp_path / "missing"
    link.symlink_to("far/real")
    missing.symlink_to(tmp_path / "far" / "new")
    (tmp_path / "far" / "real").write_text("old")
    for each in (link, missing):
        write_file(each, "new", "no")
        assert each.is_symlink() and each.resolve().parent.name == "far" and each.read_text() == "new"
    assert sorted(os.listdir(tmp_path / "far")) == ["new", "real"]


def test_a_pipe_is_written_into(tmp_path: Path):
    pipe, heard = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    write_file(pipe, "through", "no")
    reader.join(10)
    assert heard == ["through"] and stat.S_ISFIFO(pipe.stat().st_mode) and os.listdir(tmp_path) == ["pipe"]


def test_a_device_is_written_into(tmp_path: Path):
    sink = tmp_path / "sink"
    try:
        os.mknod(sink, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        sink.read_bytes()
    except PermissionError:
        pytest.skip("this user may not make or open a device")
    write_file(sink, "away", "no")
    assert stat.S_ISCHR(sink.stat().st_mode) and os.listdir(tmp_path) == ["sink"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (".", "cannot be written (Is a directory); choose another"),
        ("", "cannot be written (Is a directory); choose another"),
        ("no/such", "cannot be written (No such file or directory); choose another"),
        ("loop", "cannot be written (Too many levels of symbolic links); choose another"),
        ("a\0b", "is no name of a file; choose another"),
        ("x" * 300, "cannot be written (File name too long); choose another"),
    ],
)
def test_what_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch, name, told):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(InputError) as error:
        write_file(Path(name), "text", "choose another")
    assert str(error.value).endswith(told) and os.listdir(tmp_path) == ["loop"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, kind):
    def pieces():
        yield "half"
        raise kind

    file = tmp_path / "a"
    file.write_text("before")
    with pytest.raises(kind):
        write_file(file, pieces(), "no")
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["a"]


def test_many_that_write_at_once_leave_one_whole_file(tmp_path: Path):
    file, texts = tmp_path / "a", [str(n) * 100_000 for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_file(file, text, "no"), texts * 4))
    assert file.read_text() in texts and os.listdir(tmp_path) == ["a"]


def test_a_link_planted_at_an_old_temporary_name_is_not_followed(tmp_path: Path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".a.writing").symlink_to("theirs")
    write_file(tmp_path / "a", "mine", "no")
    assert (tmp_path / "theirs").read_text() == "theirs" and (tmp_path / "a").read_text() == "mine"
