"""Records of JSONL and Parquet files and of Hugging Face data sets, one at a time, each with the place it came from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.config.errors import InputError

HUB = "hf:"
RECORD_FILES = (".jsonl", ".parquet")
_ROWS = 256  # Parquet rows turned into Python values at once


@dataclass
class Reading:
    """How much of a source was read, `done` of `total`: bytes of files, or rows. A total of 0 is not known."""

    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Record:
    """One record: its values, its place (`line 3`), and how an error names it (`corpus 'a.jsonl', line 3`)."""

    values: Any
    place: str
    where: str


def read_records(
    corpus: str, fields: Sequence[str], needed: Sequence[str], split: str, reading: Reading
) -> Iterator[Record]:
    """The records of `hf:NAME`, of a `.jsonl` or `.parquet` file, or of a directory of such files, in order.

    Only `fields` are taken from columns; `needed` must be among them. Raises `InputError` naming the line or row.
    """
    if corpus.startswith(HUB):
        yield from hub_records(corpus, fields, needed, split, reading)
        return
    for path in corpus_files(corpus, RECORD_FILES, reading):
        yield from file_records(path, fields, needed, reading)


def corpus_files(corpus: str, suffixes: Sequence[str], reading: Reading) -> list[Path]:
    """The file that `corpus` names, or those in the directory, sorted by name; `reading` gets their size.

    Raises `InputError` for what is missing or of another kind; hidden files, READMEs and licences are passed over.
    """
    path, told = Path(corpus), f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
    if corpus and os.path.isdir(corpus):  # unlike Path.is_dir false for a name that is too long
        files = sorted(file for file in path.iterdir() if not file.name.startswith((".", "README", "LICENSE")))
        for file in files:
            if file.suffix not in suffixes or not file.is_file():
                raise InputError(f"corpus '{corpus}': '{file.name}' is no {told} file; take it out of the directory")
        if not files:
            raise InputError(f"corpus '{corpus}': the directory holds no {told} file")
    elif path.suffix in suffixes and not os.path.isfile(corpus):
        raise InputError(f"corpus '{corpus}': there is no such file")
    elif path.suffix in suffixes:
        files = [path]
    else:
        raise InputError(
            f"corpus '{corpus}' is neither shipped (plays), nor a {told} file, nor an existing directory of such files "
            "or of prepared shards, nor hf:NAME"
        )
    reading.total = sum(file.stat().st_size for file in files)
    return files


def file_records(path: Path, fields: Sequence[str], needed: Sequence[str], reading: Reading) -> Iterator[Record]:
    """The records of one `.jsonl` or `.parquet` file; `fields` and `needed` as for `read_records`."""
    if path.suffix == ".jsonl":
        return _json_lines(path, reading)
    return _parquet_rows(path, fields, needed, reading)


def _json_lines(path: Path, reading: Reading) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):  # of bytes: only \n ends a line, a JSON string may hold U+2028
            where = f"corpus '{path}', line {number}"
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{where}: not UTF-8: byte {error.start} of the line is 0x{line[error.start]:02x}; "
                    "convert the file to UTF-8"
                ) from None
            reading.done += len(line)
            text = text.removeprefix("\ufeff") if number == 1 else text
            if text.strip():
                yield Record(_parsed(text, where), f"line {number}", where)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON at column {error.colno} ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise InputError(f"{where}: JSON that cannot be read ({error})") from None


def _parquet_rows(path: Path, fields: Sequence[str], needed: Sequence[str], reading: Reading) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"corpus '{path}': Parquet needs pyarrow; pip install \"undertow[data]\"") from None
    before, number = reading.done, 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = _columns(file.schema_arrow.names, fields, needed, f"corpus '{path}'")
            for batch in file.iter_batches(_ROWS, columns=columns):
                for values in batch.to_pylist():
                    number += 1
                    yield Record(values, f"row {number}", f"corpus '{path}', row {number}")
                reading.done = before + path.stat().st_size * number // max(file.metadata.num_rows, 1)
    # The last two are of values that Python cannot hold, such as a date in the year 10,000.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(f"corpus '{path}', after row {number}: not readable as Parquet ({_line(error)})") from None


def hub_records(
    corpus: str, fields: Sequence[str], needed: Sequence[str], split: str, reading: Reading
) -> Iterator[Record]:
    """The rows of `hf:NAME[:CONFIG]` or `hf:/local/dir` by Hugging Face `datasets`, streamed."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"corpus '{corpus}': needs datasets; pip install \"undertow[data]\"") from None
    name = corpus.removeprefix(HUB)
    name, _, config = (name, "", "") if os.path.exists(name) else name.partition(":")
    number = 0
    try:
        if any((Path(name) / held).is_file() for held in ("dataset_dict.json", "state.json")):
            rows: Any = datasets.load_from_disk(name)
            rows = rows if isinstance(rows, datasets.Dataset) else rows[split]
        else:
            rows = datasets.load_dataset(name, config or None, split=split, streaming=True)
        if rows.column_names is not None:
            rows = rows.select_columns(_columns(rows.column_names, fields, needed, f"corpus '{corpus}'"))
        reading.total = len(rows) if isinstance(rows, datasets.Dataset) else 0
        for number, values in enumerate(rows, 1):
            reading.done = number
            yield Record(values, f"row {number}", f"corpus '{corpus}', row {number}")
    except InputError:
        raise
    except Exception as error:  # the library raises its own, the network's and Python's
        raise InputError(
            f"corpus '{corpus}', after row {number}: split '{split}' cannot be read by datasets ({_line(error)})"
        ) from None


def _columns(present: Sequence[str], fields: Sequence[str], needed: Sequence[str], where: str) -> list[str]:
    missing = [field for field in needed if field not in present]
    if missing:
        raise InputError(f"{where}: {told_missing(missing[0], present)}")
    return [field for field in dict.fromkeys(fields) if field in present]


def told_missing(field: str, present: Sequence[str]) -> str:
    """That the field of the text is missing, what there is instead, and how to name it."""
    listed = ", ".join(map(repr, present[:8])) + (", ..." if len(present) > 8 else "")
    return (
        f"there is no field {field!r}; it has {listed or 'none'}; name the one that holds the text with "
        "data.text_field, or --text-field of data prepare"
    )


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
