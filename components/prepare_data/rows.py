"""Rows of raw files: JSON lines, JSON, CSV, TSV and parquet, each as it is or compressed with gzip.

Text stays as it is in the file, so an answer such as `007` or `1.50` is not turned into a number and back.
"""

import csv
import gzip
import io
import json
import re
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
_MAX_RATIO, _MIN_DECOMPRESSED_BYTES = 100, 2**26
"""Largest ratio of content to gzip file (text shrinks to a tenth), and the content size that is always accepted."""
_PARQUET_ROWS = 1024
"""Rows that are in memory at once."""


class RawFile(NamedTuple):
    """One file of a split."""

    path: Path
    label: Path
    """Its name in messages: the path in the config, even if the file is in a temporary checkout or in a cache."""
    prefix: str = ""
    """Prefix of the names of its rows; empty if it is the only file of a split."""


class Row(NamedTuple):
    """One row of a file, or the reason why it cannot be used."""

    file: Path
    """The label of the file."""
    line: int
    """Line of the file, or number of the row in a JSON array or a parquet file, from 1."""
    name: str
    """`PREFIX/NUMBER` or `NUMBER`, from 00000; the prefix alone for a file of one JSON object."""
    columns: dict[str, Any] | None
    reason: str = ""
    """What is wrong with a row that has no columns."""


_RawRow = tuple[int | None, int, dict[str, Any] | str]
"""Number from 0 (None for the only object of a JSON file), line from 1, and the columns or what is wrong with them."""


def read_rows(file: RawFile) -> Iterator[Row]:
    """Yield the rows of a file in order, lazily except for JSON; PipelineError if the file cannot be read."""
    reader = _READERS.get(_uncompressed_name(file.path).suffix.lower())
    if reader is None:
        raise PipelineError(f"{file.label}: is of no format that can be read; accepted: {ACCEPTED}")
    try:
        for number, line, content in reader(file):
            names = [file.prefix] if file.prefix else []
            if number is not None:
                names.append(f"{number:05d}")
            row = Row(file.label, line, "/".join(names) or "00000", columns=None)
            yield row._replace(reason=content) if isinstance(content, str) else row._replace(columns=content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PipelineError(f"{file.label}: not a gzip file that can be read ({error})") from None
    except UnicodeError as error:
        raise PipelineError(f"{file.label}: not UTF-8 text ({error}); save it as UTF-8") from None


def count_rows(file: RawFile) -> int:
    """Return the number of rows of a file; a parquet file is not read for that."""
    if file.path.suffix == ".parquet":
        with _parquet(file) as parquet:
            return int(parquet.metadata.num_rows)
    return sum(1 for _ in read_rows(file))


def is_data_file(path: Path) -> bool:
    """Tell whether a file has a format that can be read, by its name."""
    return _uncompressed_name(path).suffix.lower() in _READERS


def stem(path: Path) -> str:
    """Return a path without the suffix of its format, and without `.gz`."""
    return _uncompressed_name(path).with_suffix("").as_posix()


def natural_order(path: str | Path) -> list[int | str]:
    """Return a sort key for paths that compares numbers by value: 2.json comes before 10.json."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _uncompressed_name(path: Path) -> Path:
    """Return a path without `.gz`."""
    return path.with_suffix("") if _is_compressed(path) else path


def _open(file: RawFile) -> IO[bytes]:
    return io.BufferedReader(_Decompressed(file.path)) if _is_compressed(file.path) else file.path.open("rb")


class _Decompressed(io.RawIOBase):
    """The content of a gzip file, up to a ratio that no real data reach: a small file could fill the memory."""

    def __init__(self, path: Path) -> None:
        self._file = gzip.GzipFile(path)
        self._num_bytes_left = max(_MIN_DECOMPRESSED_BYTES, _MAX_RATIO * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes = self._file.readinto(buffer)
        self._num_bytes_left -= num_bytes
        if self._num_bytes_left < 0:
            raise gzip.BadGzipFile(f"its content is more than {_MAX_RATIO} times as large")
        return num_bytes

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_json_lines(file: RawFile) -> Iterator[_RawRow]:
    with _open(file) as opened:
        yield from _parse_lines(opened)


def _parse_lines(lines: Iterable[bytes]) -> Iterator[_RawRow]:
    """Yield the row in each line; empty lines have none, but count."""
    for index, line in enumerate(lines):
        if content := line.removeprefix(_BYTE_ORDER_MARK).strip():
            try:
                yield index, index + 1, jsonl.parse_object(content, where="")
            except PipelineError as error:
                # Without its empty place, and without the hint about a whole file.
                yield index, index + 1, str(error).removeprefix(": ").removesuffix("; is the file truncated?")


def _read_json(file: RawFile) -> Iterator[_RawRow]:
    """Yield the rows of a file that has an array of objects, only one object, or JSON lines."""
    with _open(file) as opened:
        content = opened.read().removeprefix(_BYTE_ORDER_MARK)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        if content.lstrip().startswith(b"["):
            raise PipelineError(f"{file.label}: not a valid JSON array ({error})") from None
        yield from _parse_lines(content.splitlines())
        return
    if not isinstance(values, list):
        yield None, 1, values if isinstance(values, dict) else "expected a JSON object"
        return
    for index, value in enumerate(values):
        if isinstance(value, dict):
            yield index, index + 1, value
        else:
            yield index, index + 1, f"expected a JSON object, got {type(value).__name__}"


def _read_delimited(file: RawFile, *, delimiters: str) -> Iterator[_RawRow]:
    """Yield the rows below a header, as text without carriage returns; an empty cell is None."""
    csv.field_size_limit(2**31 - 1)  # the default is too small for long solutions
    with _open(file) as opened:
        start = opened.read(2)
    encoding = "utf-16" if start in _UTF_16_MARKS else "utf-8-sig"
    with _open(file) as opened, io.TextIOWrapper(opened, encoding=encoding, newline="") as text:
        first = text.readline()
        delimiter = max(delimiters, key=first.count)  # spreadsheets choose it by country
        reader = csv.reader(chain([first], text), delimiter=delimiter, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            if not any(header):
                raise PipelineError(f"{file.label}: is empty; its first line has to name the columns")
            twice = next((name for name in header if header.count(name) > 1), None)
            if twice is not None:
                raise PipelineError(f'{file.label}:1: two columns are named "{twice}"; rename one of them')
            line = reader.line_num + 1
            for index, values in enumerate(reader):
                if values:
                    yield index, line, _named_cells(header, values)
                line = reader.line_num + 1
        except csv.Error as error:
            raise PipelineError(f"{file.label}:{reader.line_num}: not valid CSV ({error})") from None


def _named_cells(header: list[str], values: list[str]) -> dict[str, Any] | str:
    """Return the columns of a row, or what is wrong with it."""
    if len(values) != len(header):
        return f"has {len(values)} fields, and the header has {len(header)}; is a field with a comma not in quotes?"
    cells = (value.replace("\r\n", "\n") if value.strip() else None for value in values)
    return dict(zip(header, cells, strict=True))


@contextmanager
def _parquet(file: RawFile) -> Iterator[Any]:
    # Imported here because it is slow to load, and most runs read text.
    import pyarrow
    import pyarrow.parquet

    try:
        source = io.BytesIO(_open(file).read()) if _is_compressed(file.path) else file.path
        with pyarrow.parquet.ParquetFile(source) as parquet:
            yield parquet
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise PipelineError(f"{file.label}: not a readable parquet file ({reason}); is it truncated?") from None


def _read_parquet(file: RawFile) -> Iterator[_RawRow]:
    with _parquet(file) as parquet:
        index = 0
        for batch in parquet.iter_batches(_PARQUET_ROWS):
            for columns in _shortest_decimals(batch).to_pylist():
                yield index, index + 1, columns
                index += 1


def _shortest_decimals(batch: Any) -> Any:
    """Return a batch of rows with float32 columns as float64, converted through text: 0.1 instead of 0.10000000149."""
    import pyarrow

    for index, field in enumerate(batch.schema):
        if pyarrow.types.is_float32(field.type):
            decimals = batch.column(index).cast(pyarrow.string()).cast(pyarrow.float64())
            batch = batch.set_column(index, field.name, decimals)
    return batch


_READERS: dict[str, Callable[[RawFile], Iterator[_RawRow]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": partial(_read_delimited, delimiters=",;\t"),
    ".tsv": partial(_read_delimited, delimiters="\t"),
    ".parquet": _read_parquet,
}
"""Reader by the suffix of a file, without `.gz`."""
