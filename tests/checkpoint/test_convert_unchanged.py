"""A source that changes under a conversion, files of it that cannot be read, and a target that another one makes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoint.release import release_tensors, tiny, write_release
from undertow.checkpoint.convert import conversion
from undertow.checkpoint.convert.conversion import convert
from undertow.checkpoint.convert.target import Wish
from undertow.cli import main
from undertow.config.errors import InputError

SECOND = "model-00002-of-00002.safetensors"
SHARD = 1_000_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_release(tmp_path / "source", tiny())
    return tmp_path / "source"


@contextmanager
def without_rights() -> Iterator[None]:
    """Nobody for a while: root may read everything."""
    root = os.geteuid() == 0
    if root:
        os.setegid(65534)
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
            os.setegid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that nobody can write to and list, unlike those of `tmp_path`; a source lies in it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    write_release(folder / "source", tiny())
    for path in (folder / "source").iterdir():
        path.chmod(0o644)
    (folder / "source").chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def copied_over(tensors: Path, moment: float, source: Path):
    """A progress that copies `tensors` over the second file of the source once."""
    left = [tensors]

    def progress(what: str, done: int, of: int) -> None:
        if left and done > moment * of:
            shutil.copyfile(left.pop(), source / SECOND)

    return progress


def test_a_shard_that_is_replaced_in_the_middle(source: Path, tmp_path: Path) -> None:
    write_release(tmp_path / "other", tiny(), release_tensors(tiny(), seed=1))
    other = tmp_path / "other" / SECOND
    assert other.stat().st_size == (source / SECOND).stat().st_size
    progress = copied_over(other, 0.75, source)
    with pytest.raises(InputError, match=f"/source/{SECOND}: changed while it was read, so that the result"):
        convert(source, tmp_path / "made", Wish(), SHARD, progress=progress)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "source"]
    assert convert(source, tmp_path / "made", Wish(), SHARD).resumed == 0


def test_a_shard_that_is_replaced_by_one_of_the_same_time(source: Path, tmp_path: Path) -> None:
    write_release(tmp_path / "other", tiny(), release_tensors(tiny(), seed=1))
    time = (source / SECOND).stat().st_mtime_ns
    os.utime(tmp_path / "other" / SECOND, ns=(time, time))

    def progress(what: str, done: int, of: int) -> None:
        shutil.copy2(tmp_path / "other" / SECOND, source / SECOND)

    with pytest.raises(InputError, match="/source: changed while it was read, so that the result would be of two mod"):
        convert(source, tmp_path / "made", Wish(), SHARD, progress=progress)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "source"]


@pytest.mark.parametrize("name", ["config.json", "LICENSE", "model.safetensors.index.json"])
def test_a_small_file_that_is_written_again_in_the_middle(name: str, source: Path, tmp_path: Path) -> None:
    text = (source / name).read_bytes()

    def progress(what: str, done: int, of: int) -> None:
        (source / name).write_bytes(text)
        os.utime(source / name, ns=(0, 0))

    with pytest.raises(InputError, match=f"/source/{name}: changed while it was read"):
        convert(source, tmp_path / "made", Wish(), progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_verification_against_a_source_that_changes(source: Path, tmp_path: Path) -> None:
    write_release(tmp_path / "other", tiny(), release_tensors(tiny(), seed=1))
    assert convert(source, tmp_path / "made", Wish()).done
    progress = copied_over(tmp_path / "other" / SECOND, 0.1, source)
    with pytest.raises(InputError, match=f"/source/{SECOND}: changed while it was read"):
        convert(source, tmp_path / "made", Wish(), verify=True, progress=progress)


def test_what_a_conversion_does_not_read_may_change(source: Path, tmp_path: Path) -> None:
    (source / "log.txt").write_text("begun")

    def progress(what: str, done: int, of: int) -> None:
        (source / "log.txt").write_text(f"{done} of {of}")

    assert convert(source, tmp_path / "made", Wish(), progress=progress).left == ("log.txt",)


def test_a_target_that_another_conversion_finished_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, looked = tmp_path / "made", conversion.finished_at

    def overtaken(*words):
        found = looked(*words)
        monkeypatch.setattr(conversion, "finished_at", looked)
        assert convert(source, made, Wish()).resumed == 0
        return found

    monkeypatch.setattr(conversion, "finished_at", overtaken)
    assert convert(source, made, Wish(), verify=True).resumed == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "source"]


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("path", "mode", "said"),
    [
        ("source/LICENSE", 0, "/source/LICENSE: cannot be read (Permission denied)"),
        (f"source/{SECOND}", 0, f"/source/{SECOND}: cannot be read (Permission denied)"),
        ("source", 0o711, "/source: cannot be read (Permission denied); give yourself the right to list it"),
        ("source", 0o744, "/source: cannot be read (Permission denied); give yourself the right to list it"),
        ("closed", 0o700, "/closed/made: cannot be written, since /"),
        ("closed", 0o555, "/closed/made: cannot be written, since /"),
    ],
)
def test_rights_that_are_lacking_are_told_before_anything_is_written(
    path: str, mode: int, said: str, options: list[str], open_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (open_folder / "closed").mkdir()
    (open_folder / path).chmod(mode)
    with without_rights():
        code = main(["convert", str(open_folder / "source"), str(open_folder / "closed/made"), *options])
    output = capsys.readouterr()
    assert code == 2 and output.err.startswith("error: ") and said in output.err and output.err.count("\n") == 1
    (open_folder / path).chmod(0o755)
    assert sorted(each.name for each in open_folder.iterdir()) == ["closed", "source"]
    assert not list((open_folder / "closed").iterdir())


def test_a_carried_file_whose_name_is_no_text(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open(os.fsencode(source) + b"/LICENSE\xff", "w").close()
    assert main(["convert", str(source), str(tmp_path / "made")]) == 2
    assert capsys.readouterr().err == (
        f"error: {source}/LICENSE\\udcff: its name is no text in UTF-8, as lists of sums are; rename it\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_name_that_leaves_hidden_ones_no_room(
    options: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(source), str(tmp_path / ("d" * 244)), *options]) == 2
    assert "its name has more than 243 bytes, too long for hidden ones; shorten it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert main(["convert", str(source), str(tmp_path / ("d" * 243)), *options]) == 0
