"""What datasets in files share: the three layouts of raw rows, lines without a row, and columns without a text."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from components.prepare_data.source import MalformedRowError, raw_rows, text
from components.shared.errors import PipelineError

_ROWS = [{"problem": f"question {index}", "level": index} for index in range(3)]


def test_json_lines_keep_their_line_numbers(tmp_path: Path) -> None:
    """Blank lines are no rows, but they count: a message must point at the right line, and an id at the same row."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    rows = list(raw_rows(path))
    assert [(row.line, row.name, row.columns()) for row in rows] == [(1, "00000", {"a": 1}), (3, "00002", {"a": 2})]


def test_parquet_and_json_lines_give_the_same_rows(tmp_path: Path) -> None:
    """The layout of a file changes neither its rows nor their names."""
    lines, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in _ROWS), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_ROWS), parquet)
    read = [[(row.line, row.name, row.columns()) for row in raw_rows(path)] for path in (lines, parquet)]
    assert read[0] == read[1]
    assert [columns for _, _, columns in read[0]] == _ROWS


def test_folder_is_read_by_subject_and_number(tmp_path: Path) -> None:
    """One JSON file per problem, of any layout inside; 2.json comes before 10.json, and other files are ignored."""
    for name in ("algebra/10.json", "algebra/2.json", "geometry/1.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"problem": name}, indent=2), encoding="utf-8")
    (tmp_path / "README.md").write_text("no problem", encoding="utf-8")
    rows = list(raw_rows(tmp_path))
    assert [row.name for row in rows] == ["algebra/2", "algebra/10", "geometry/1"]
    assert [row.columns()["problem"] for row in rows] == ["algebra/2.json", "algebra/10.json", "geometry/1.json"]
    assert (rows[0].path, rows[0].line) == (tmp_path / "algebra/2.json", 1)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"question": "cut o', "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b'{"question": "caf\xe9"}', "not UTF-8 text (byte 17 of the line)"),
        (b"[" * 100_000, "not valid JSON (nested too deeply)"),
    ],
)
def test_line_without_an_object_is_malformed(tmp_path: Path, line: bytes, reason: str) -> None:
    """The reason does not repeat file and line, which quarantine.jsonl has beside it."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(MalformedRowError) as refused:
        next(raw_rows(path)).columns()
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize("content", [b"", b"PAR1 cut off", b'{"problem": "json"}'])
def test_file_that_is_not_parquet_is_an_error(tmp_path: Path, content: bytes) -> None:
    """A truncated parquet file has no readable row at all, so it cannot be quarantined row by row."""
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises(PipelineError, match=r"rows\.parquet: not a readable parquet file"):
        list(raw_rows(path))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "column `text` or `prompt` is missing"),
        (" ", "column `prompt` is empty"),
        (7, "column `prompt` is 7, expected text"),
        (["x" * 1000], f'column `prompt` is ["{"x" * 38}..., expected text'),
        ("\ud800", "column `prompt` contains half a surrogate pair"),
    ],
)
def test_column_without_text_is_malformed(value: Any, reason: str) -> None:
    """The reason names the column and what is wrong with it."""
    with pytest.raises(MalformedRowError) as refused:
        text({"prompt": value}, "text", "prompt")
    assert reason in str(refused.value)
