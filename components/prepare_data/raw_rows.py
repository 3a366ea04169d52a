"""Raw rows of a dataset: JSON lines, parquet, or a folder of JSON files, each with the place it came from."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.shared import jsonl
from components.shared.errors import PipelineError

_MAX_SHOWN = 40


class MalformedRowError(ValueError):
    """One row cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row before anything of it is trusted."""

    path: Path
    line: int
    """Line of the file, or row of a parquet file, from 1."""
    name: str
    """Stable within the split: the row's number from 0, or its path in a folder."""
    content: bytes | dict[str, Any]

    def columns(self) -> dict[str, Any]:
        """Return the row's columns; MalformedRowError where its text is no JSON object."""
        if isinstance(self.content, dict):
            return self.content
        where = f"{self.path}:{self.line}"
        try:
            return jsonl.parse_object(self.content, where=where)
        except PipelineError as error:
            raise MalformedRowError(str(error).removeprefix(f"{where}: ")) from None
        except RecursionError:
            raise MalformedRowError("not valid JSON (nested too deeply)") from None


def raw_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a JSON lines file, a parquet file, or a folder with one JSON file per problem."""
    if path.is_dir():
        yield from _folder_rows(path)
    elif path.suffix == ".parquet" and path.exists():
        yield from _parquet_rows(path)
    else:
        yield from _json_lines(path)


def text(columns: dict[str, Any], *names: str) -> str:
    """Return the first of the columns that is there; MalformedRowError unless it is text that can be written again."""
    name = next((name for name in names if columns.get(name) is not None), None)
    if name is None:
        raise MalformedRowError(f"column {' or '.join(f'`{name}`' for name in names)} is missing")
    value = columns[name]
    if not isinstance(value, str):
        raise MalformedRowError(f"column `{name}` is {shown(value)}, expected text")
    if not value.strip():
        raise MalformedRowError(f"column `{name}` is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise MalformedRowError(f"column `{name}` holds half a surrogate pair, which is no character") from None
    return value


def shown(value: Any) -> str:
    """A value as it may stand in a message: JSON in a few characters."""
    whole = json.dumps(value, default=str)
    return whole if len(whole) <= _MAX_SHOWN else f"{whole[:_MAX_SHOWN]}..."


def _json_lines(path: Path) -> Iterator[RawRow]:
    for index, line in enumerate(jsonl.read_lines(path)):
        if line.strip():
            yield RawRow(path, index + 1, f"{index:05d}", line)


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    # Imported here: slow to load, and most runs read JSON lines.
    import pyarrow
    import pyarrow.parquet

    try:
        batches = list(pyarrow.parquet.ParquetFile(path).iter_batches())
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise PipelineError(f"{path}: is no readable parquet file ({reason}); is it truncated?") from None
    rows = (row for batch in batches for row in batch.to_pylist())
    for index, row in enumerate(rows):
        yield RawRow(path, index + 1, f"{index:05d}", row)


def _folder_rows(folder: Path) -> Iterator[RawRow]:
    for path in sorted(folder.rglob("*.json"), key=lambda path: _natural_order(path.relative_to(folder))):
        yield RawRow(path, 1, path.relative_to(folder).with_suffix("").as_posix(), path.read_bytes())


def _natural_order(path: Path) -> tuple[tuple[str, ...], int, str]:
    """By folder, then by number: 2.json before 10.json."""
    return path.parts[:-1], int(path.stem) if path.stem.isdecimal() else -1, path.name
