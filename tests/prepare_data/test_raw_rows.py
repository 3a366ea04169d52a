"""Raw rows: the three layouts of a dataset, and lines that hold no row."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from components.prepare_data.source import MalformedRowError, excerpt, raw_rows
from components.shared.errors import PipelineError

_ROWS = [{"problem": f"question {index}", "level": index} for index in range(3)]


def test_json_lines_keep_their_line_numbers(tmp_path: Path) -> None:
    """Blank lines are no rows, but they count: a message must point at the right line, and an id at the same row."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    rows = list(raw_rows(path))
    assert [(row.line, row.name, row.columns()) for row in rows] == [(1, "00000", {"a": 1}), (3, "00002", {"a": 2})]


def test_parquet_gives_the_rows_that_json_lines_give(tmp_path: Path) -> None:
    """The layout of a file changes neither its rows nor their names."""
    lines, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in _ROWS), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_ROWS), parquet)
    read = [[(row.line, row.name, row.columns()) for row in raw_rows(path)] for path in (lines, parquet)]
    assert read[0] == read[1]
    assert [columns for _, _, columns in read[0]] == _ROWS


def test_a_folder_is_read_by_subject_and_number(tmp_path: Path) -> None:
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
        (b"nonsense", "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b'{"question": "caf\xe9"}', "not UTF-8 text (byte 17 of the line)"),
        (b"[" * 100_000, "not valid JSON (nested too deeply)"),
    ],
)
def test_a_line_without_an_object_says_why(tmp_path: Path, line: bytes, reason: str) -> None:
    """The reason stands alone: file and line are kept beside it."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(MalformedRowError) as refused:
        next(raw_rows(path)).columns()
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize("content", [b"", b"PAR1 cut off", b'{"problem": "json"}'])
def test_a_file_that_is_no_parquet_is_an_error(tmp_path: Path, content: bytes) -> None:
    """A truncated parquet file has no readable row at all, so it cannot be quarantined row by row."""
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises(PipelineError, match=r"rows\.parquet: not a readable parquet file"):
        list(raw_rows(path))


def test_a_shown_value_is_short() -> None:
    """A reason stays readable whatever the row holds."""
    assert excerpt("five") == '"five"'
    assert len(excerpt("x" * 1000)) < 50
