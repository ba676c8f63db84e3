"""A conversion that is killed goes on where it was; a target is complete or absent, and never another's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import small_disk
from tests.checkpoint.release import tiny, write_release
from undertow.checkpoint.convert import conversion
from undertow.checkpoint.convert.conversion import convert
from undertow.checkpoint.convert.digest import file_digest, sampled_digest
from undertow.checkpoint.convert.journal import Journal
from undertow.checkpoint.convert.target import Wish
from undertow.config.errors import DoesNotFit, InputError, UndertowError

BF16 = Wish(precision="bf16")
SHARD = 60_000
_SLOW = """
import sys, time
from pathlib import Path
from undertow.checkpoint.convert import conversion
from undertow.checkpoint.convert.target import Wish
def progress(what, done, of):
    print(done, flush=True)
    time.sleep(0.002)
conversion.convert(sys.argv[1], sys.argv[2], Wish(precision="bf16"), shard_bytes=60_000, progress=progress)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_release(tmp_path / "source", tiny())
    return tmp_path / "source"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_killed_at_five_moments_it_ends_with_the_same_bytes(source: Path, tmp_path: Path) -> None:
    whole, place = tmp_path / "whole", tmp_path / "killed"
    report = convert(source, whole, BF16, SHARD)
    work = tmp_path / ".killed.converting"
    finished: dict[str, int] = {}
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        child = subprocess.Popen([sys.executable, "-c", _SLOW, source, place], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) > share * report.size:
                break
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        assert not place.exists()
        now = {file.name: file.stat().st_mtime_ns for file in work.glob("*.safetensors")}
        assert finished.items() <= now.items()
        finished = now
    again = convert(source, place, BF16, SHARD, verify=True)
    assert again.resumed in (len(finished) - 1, len(finished)) and len(finished) > report.files // 2
    assert contents(place) == contents(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "source", "whole"]


def test_a_finished_conversion_is_left_alone(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    report = convert(source, place, BF16, SHARD)
    before = {path: path.stat().st_mtime_ns for path in place.iterdir()}
    (tmp_path / ".place.journal").write_text('{"conversion": 1}\n')  # left by a kill between the last two steps
    again = convert(source, place, BF16, SHARD, verify=True)
    assert again.already and not report.already
    assert again.resumed == report.files and before == {path: path.stat().st_mtime_ns for path in place.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["place", "source"]


def test_a_line_cut_short_did_not_happen(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"

    def stop(what: str, done: int, of: int) -> None:
        if done > of // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, place, BF16, SHARD, progress=stop)
    with (tmp_path / ".place.journal").open("a") as journal:
        journal.write('{"file": "model-00001-of')
    assert convert(source, place, BF16, SHARD, verify=True).resumed > 3


def refused(source: Path, target: Path, wish: Wish = BF16) -> str:
    with pytest.raises(InputError) as caught:
        convert(source, target, wish, SHARD)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_targets_that_are_taken(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    convert(source, place, BF16, SHARD)
    before = contents(place)
    assert "with --to released --dtype bf16, not --to undertow; give what" in refused(source, place, Wish("undertow"))
    file = source / "model-00001-of-00002.safetensors"
    held = file.read_bytes()
    file.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    assert "holds a conversion of another source, or of this one before its files changed" in refused(source, place)
    file.write_bytes(held)
    assert contents(place) == before
    (place / "conversion.json").unlink()
    assert "exists and is no finished conversion" in refused(source, place)
    assert "is a file; a new directory is expected" in refused(source, _file(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    convert(source, empty, BF16, SHARD)
    assert (empty / "config.json").exists()


def test_a_source_is_known_by_what_it_holds(source: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, of: int) -> None:
        if done > of // 2:
            raise KeyboardInterrupt

    place, copy = tmp_path / "place", tmp_path / "copy"
    with pytest.raises(KeyboardInterrupt):
        convert(source, place, BF16, SHARD, progress=stop)
    for file in source.iterdir():
        os.utime(file, (1, 1))
    assert convert(source, place, BF16, SHARD).resumed > 3
    before = contents(place)
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    assert convert(copy, place, BF16, SHARD, verify=True).already
    (copy / "LICENSE").write_text("another")
    assert "holds a conversion of another source" in refused(copy, place)
    assert contents(place) == before


@pytest.mark.parametrize("at", [0, 99_999, 1 << 23, (1 << 24) + 99_999])
def test_a_sample_of_a_large_file_sees_what_is_trained(at: int, tmp_path: Path) -> None:
    head, size = 100_000, (1 << 24) + 100_000
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    whole = sampled_digest(file, head)
    assert whole == sampled_digest(file, head) != file_digest(file)
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(b"\1" * (1 if at < head or at + 1 == size else 1 << 17))
    assert sampled_digest(file, head) != whole
    file.write_bytes(bytes(size + 1))
    assert sampled_digest(file, head) != whole


def test_a_file_of_16_mib_is_summed_up_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 24))
    assert sampled_digest(tmp_path / "file") == file_digest(tmp_path / "file")


def _file(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file"


def test_source_and_target_lie_apart(source: Path, tmp_path: Path) -> None:
    assert "is the source; name a new directory" in refused(source, source)
    (tmp_path / "link").symlink_to(source)
    assert "is the source" in refused(source, tmp_path / "link")
    assert "lies in the source" in refused(source, source / "inner")
    assert "contains the source" in refused(source, tmp_path)
    assert "no such directory" in refused(tmp_path / "absent", tmp_path / "place")


def test_an_unfinished_conversion_of_another_kind_is_named(source: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, of: int) -> None:
        raise KeyboardInterrupt

    place = tmp_path / "place"
    with pytest.raises(KeyboardInterrupt):
        convert(source, place, BF16, SHARD, progress=stop)
    said = refused(source, place, Wish("undertow"))
    assert "holds an unfinished conversion with --to released --dtype bf16, not --to undertow; finish that" in said
    assert convert(source, place, BF16, SHARD).done


def test_two_at_once(source: Path, tmp_path: Path) -> None:
    identity = {"held": "by the other"}
    with Journal(tmp_path / "place", identity):
        assert "another process is converting to it" in refused(source, tmp_path / "place")


def test_what_no_conversion_wrote_is_not_removed(source: Path, tmp_path: Path) -> None:
    work, journal = tmp_path / ".place.converting", tmp_path / ".place.journal"
    work.mkdir()
    (work / "precious").write_text("x")
    assert "no journal says that a conversion wrote it" in refused(source, tmp_path / "place")
    assert (work / "precious").read_text() == "x" and not journal.exists()
    shutil.rmtree(work)
    (tmp_path / "elsewhere").mkdir()
    work.symlink_to("elsewhere")
    assert "no journal says that a conversion wrote it" in refused(source, tmp_path / "place")
    work.unlink()
    os.mkfifo(journal)
    assert f"{journal}: is a pipe or a device, no journal" in refused(source, tmp_path / "place")
    journal.unlink()
    for foreign in ("no\njournal", "a line that does not end", '{"other": 1}\n'):
        journal.write_text(foreign)
        assert f"{journal}: is no journal of a conversion; remove it" in refused(source, tmp_path / "place")
        assert journal.read_text() == foreign
    journal.write_text('{"conversion": 1}\n{"file": 3}\n')
    assert f"{journal}: damaged" in refused(source, tmp_path / "place")
    journal.write_text('{"conv')  # as a kill leaves it
    work.mkdir()
    convert(source, tmp_path / "place", BF16, SHARD)
    journal.write_text("a line that does not end")
    assert convert(source, tmp_path / "place", BF16, SHARD).already
    assert journal.read_text() == "a line that does not end"


def test_a_conversion_that_lost_a_file_is_not_finished(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    convert(source, place, BF16, SHARD)
    for name in ("model-00002-of-", "config.json", "LICENSE", "SHA256SUMS", "model.safetensors.index.json"):
        file = next(path for path in place.iterdir() if path.name.startswith(name))
        held = file.read_bytes()
        file.unlink()
        assert f"{file}: is gone from the finished conversion" in refused(source, place)
        file.write_bytes(held + b" ")
        if name != "SHA256SUMS":
            assert f"{file}: has {len(held) + 1} bytes, the conversion wrote {len(held)}" in refused(source, place)
        file.write_bytes(held)
    assert convert(source, place, BF16, SHARD, verify=True).verified


@pytest.mark.parametrize("change", [lambda text: b"", lambda text: b"\xff\xfe", lambda text: text.split(b"\n", 1)[1]])
def test_verification_needs_the_sum_of_every_file(
    source: Path, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    place = tmp_path / "place"
    convert(source, place, BF16, SHARD)
    (place / "SHA256SUMS").write_bytes(change((place / "SHA256SUMS").read_bytes()))
    with pytest.raises(UndertowError, match=r"SHA256SUMS: (has no sum of|cannot be read as a list of sums)") as caught:
        convert(source, place, BF16, SHARD, verify=True)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not small_disk.possible(), reason="no file system may be mounted here")
def test_a_disk_that_is_full_from_the_start(source: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    result = small_disk.on_small_disk("tests.checkpoint.full_from_start", tmp_path / "disk", "1m", str(source))
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert all("cannot be written (No space left on device); what is finished is kept" in line for line in said[:-1])
    assert len(said) == 2 and re.search(r"place: \d+\.\d MB are needed, 1\.0 MB are free; free some", said[-1])


def test_too_small_a_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_SPARE", 1 << 60)
    for dry_run in (True, False):
        with pytest.raises(DoesNotFit, match=r"GB are needed, .* GB are free"):
            convert(source, tmp_path / "place", BF16, SHARD, dry_run=dry_run)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_verification_finds_a_flipped_bit(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    convert(source, place, BF16, SHARD, verify=True)
    file = sorted(place.glob("model-*.safetensors"))[2]
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(UndertowError, match=rf"{file.name}: its SHA-256 is .*, SHA256SUMS says"):
        convert(source, place, BF16, SHARD, verify=True)
