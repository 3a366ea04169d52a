"""Rows of raw files: JSON lines, JSON, CSV, TSV and parquet, each as it is or compressed with gzip.

Text stays as it is in the file, so an answer such as `007` or `1.50` is not turned into a number and back.
"""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from components.shared import jsonl
from components.shared.errors import PipelineError

ACCEPTED = "JSON lines (.jsonl), JSON (.json), CSV (.csv), TSV (.tsv) and parquet (.parquet), each also with .gz"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_HINT = re.compile(r"^: |; is the file truncated\?$")
_MAX_RATIO, _MIN_DECOMPRESSED_BYTES = 100, 2**26
"""Largest ratio of content to gzip file (text shrinks to a tenth), and the content that is always accepted."""
_PARQUET_ROWS = 1024
"""Rows that are in memory at once."""


class RawFile(NamedTuple):
    """One file of a split."""

    path: Path
    label: Path
    """Its name in messages: the path in the config, even if the file is in a temporary checkout or in a cache."""
    prefix: str = ""
    """Prefix of the names of its rows; empty for the only file of a split."""


class Row(NamedTuple):
    """One row of a file, or the reason why it cannot be used."""

    file: Path
    """The label of the file."""
    line: int
    """Line of the file, or number of the row in a JSON array or a parquet file, from 1."""
    name: str
    """Number of the row from 0, after the prefix of the file; for a file with a single object, its prefix alone."""
    columns: dict[str, Any] | None
    reason: str = ""
    """What is wrong with a row that has no columns."""


_Cell = tuple[int | None, int, dict[str, Any] | str]
"""A row by its number, which the only object of a file has not, its line, and its columns or what is wrong with it."""


def read_rows(file: RawFile) -> Iterator[Row]:
    """Yield the rows of a file in their order, the first of them before the whole file is read where it allows that.

    Raises:
        PipelineError: The file is of no known format, damaged, or not text in UTF-8.
    """
    name = Path(file.label.stem if _is_compressed(file.path) else file.label)
    reader = _READERS.get(name.suffix.lower())
    if reader is None:
        raise PipelineError(f"{file.label}: is of no format that can be read; accepted: {ACCEPTED}")
    try:
        for number, line, content in reader(file):
            parts = [part for part in (file.prefix, "" if number is None else f"{number:05d}") if part]
            columns, reason = (None, content) if isinstance(content, str) else (content, "")
            yield Row(file.label, line, "/".join(parts) or "00000", columns, reason)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PipelineError(f"{file.label}: not a gzip file that can be read ({error})") from None
    except UnicodeError as error:
        raise PipelineError(f"{file.label}: not UTF-8 text ({error}); save it as UTF-8") from None


def count_rows(file: RawFile) -> int:
    """Return the number of rows of a file; those of parquet are not read."""
    if file.path.suffix == ".parquet":
        with _parquet(file) as parquet:
            return int(parquet.metadata.num_rows)
    return sum(1 for _ in read_rows(file))


def is_data_file(path: Path) -> bool:
    """Tell whether the name of a file is that of a format that can be read."""
    return Path(path.stem if _is_compressed(path) else path).suffix.lower() in _READERS


def stem(path: Path) -> str:
    """Return a path without the ending that says its format."""
    return (path.with_suffix("").with_suffix("") if _is_compressed(path) else path.with_suffix("")).as_posix()


def natural_order(path: str | Path) -> list[int | str]:
    """Order 2.json before 10.json, and both after what is in other folders before them."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _open(file: RawFile) -> IO[bytes]:
    return io.BufferedReader(_Decompressed(file.path)) if _is_compressed(file.path) else file.path.open("rb")


class _Decompressed(io.RawIOBase):
    """The content of a gzip file, up to a ratio that no data reach: a small file could fill the memory."""

    def __init__(self, path: Path) -> None:
        self._file = gzip.GzipFile(path)
        self._left = max(_MIN_DECOMPRESSED_BYTES, _MAX_RATIO * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        number = self._file.readinto(buffer)
        self._left -= number
        if self._left < 0:
            raise gzip.BadGzipFile(f"its content is more than {_MAX_RATIO} times as large")
        return number

    def close(self) -> None:
        self._file.close()
        super().close()


# JSON -----------------------------------------------------------------------------------------------------------------


def _read_json_lines(file: RawFile) -> Iterator[_Cell]:
    with _open(file) as opened:
        yield from _cells(opened)


def _cells(lines: Iterable[bytes]) -> Iterator[_Cell]:
    """Yield a cell for each line but empty ones, which count: a message must point at the right line."""
    for index, line in enumerate(lines):
        if content := line.removeprefix(_BYTE_ORDER_MARK).strip():
            try:
                yield index, index + 1, jsonl.parse_object(content, where="")
            except PipelineError as error:
                yield index, index + 1, _HINT.sub("", str(error))


def _read_json(file: RawFile) -> Iterator[_Cell]:
    """Yield the objects of an array, the one object of a file, or those in the lines of a file with another ending."""
    with _open(file) as opened:
        content = opened.read().removeprefix(_BYTE_ORDER_MARK)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        if content.lstrip().startswith(b"["):
            raise PipelineError(f"{file.label}: not a valid JSON array ({error})") from None
        yield from _cells(content.splitlines())
        return
    if not isinstance(values, list):
        yield None, 1, values if isinstance(values, dict) else "expected a JSON object"
        return
    for index, value in enumerate(values):
        is_object = isinstance(value, dict)
        yield index, index + 1, value if is_object else f"expected a JSON object, got {type(value).__name__}"


# CSV and TSV ----------------------------------------------------------------------------------------------------------


def _read_delimited(file: RawFile, *, delimiters: str) -> Iterator[_Cell]:
    """Yield the rows below a header, as text without carriage returns; an empty cell is None.

    Columns are separated by the delimiter that the header has most of, which spreadsheets choose by country.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # of a long solution
    with _open(file) as opened:
        start = opened.read(2)
    encoding = "utf-16" if start in _UTF_16_MARKS else "utf-8-sig"
    with _open(file) as opened, io.TextIOWrapper(opened, encoding=encoding, newline="") as text:
        first = text.readline()
        reader = csv.reader(chain([first], text), delimiter=max(delimiters, key=first.count), strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_header(file, header)
            line = reader.line_num + 1
            for index, values in enumerate(reader):
                if values:
                    yield index, line, _csv_cell(header, values)
                line = reader.line_num + 1
        except csv.Error as error:
            raise PipelineError(f"{file.label}:{reader.line_num}: not valid CSV ({error})") from None


def _check_header(file: RawFile, header: list[str]) -> None:
    if not any(header):
        raise PipelineError(f"{file.label}: is empty; its first line has to name the columns")
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise PipelineError(f'{file.label}:1: two columns are named "{twice}"; rename one of them')


def _csv_cell(header: list[str], values: list[str]) -> dict[str, Any] | str:
    if len(values) != len(header):
        return f"has {len(values)} fields, and the header has {len(header)}; is a field with a comma not in quotes?"
    cells = (value.replace("\r\n", "\n") if value.strip() else None for value in values)
    return dict(zip(header, cells, strict=True))


# Parquet --------------------------------------------------------------------------------------------------------------


@contextmanager
def _parquet(file: RawFile) -> Iterator[Any]:
    # Imported here: slow to load, and most runs read text.
    import pyarrow
    import pyarrow.parquet

    try:
        source = io.BytesIO(_open(file).read()) if _is_compressed(file.path) else file.path
        with pyarrow.parquet.ParquetFile(source) as parquet:
            yield parquet
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise PipelineError(f"{file.label}: not a readable parquet file ({reason}); is it truncated?") from None


def _read_parquet(file: RawFile) -> Iterator[_Cell]:
    index = 0
    with _parquet(file) as parquet:
        for batch in parquet.iter_batches(_PARQUET_ROWS):
            for columns in _decimal(batch).to_pylist():
                yield index, index + 1, columns
                index += 1


def _decimal(batch: Any) -> Any:
    """Return rows with single-precision numbers as the decimals that were meant: 0.1, not 0.10000000149."""
    import pyarrow

    for place, field in enumerate(batch.schema):
        if pyarrow.types.is_float32(field.type):
            exact = batch.column(place).cast(pyarrow.string()).cast(pyarrow.float64())
            batch = batch.set_column(place, field.name, exact)
    return batch


_READERS: dict[str, Callable[[RawFile], Iterator[_Cell]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": partial(_read_delimited, delimiters=",;\t"),
    ".tsv": partial(_read_delimited, delimiters="\t"),
    ".parquet": _read_parquet,
}
"""By the ending of a file's name."""
