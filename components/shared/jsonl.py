"""JSON lines and JSON files: read with errors that name file and line, written in one layout."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from components.shared.errors import PipelineError


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each non-empty line; PipelineError with file and line for a bad one."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, parse_object(line, where=f"{path}:{number}")
    except FileNotFoundError:
        raise PipelineError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise PipelineError(f"{path}: is a folder, expected a JSON lines file") from None


def parse_object(line: bytes, *, where: str) -> dict[str, Any]:
    """Return the JSON object in one line; PipelineError, beginning with `where`, if there is none."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PipelineError(f"{where}: not UTF-8 text (byte {error.start} of the line)") from None
    except ValueError as error:
        raise PipelineError(f"{where}: not valid JSON ({error}); is the file truncated?") from None
    except RecursionError:
        raise PipelineError(f"{where}: not valid JSON (nested too deeply)") from None
    if not isinstance(row, dict):
        raise PipelineError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one compact JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; PipelineError if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise PipelineError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise PipelineError(f"{path}: is a folder, expected a JSON file") from None
    except (ValueError, RecursionError):
        raise PipelineError(f"{path}: not valid JSON; is the file truncated?") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file with stable layout: equal values give equal bytes."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
