"""JSON lines: what is written comes back, and a bad line is named."""

from pathlib import Path
from typing import Any

import pytest

from components.shared.errors import PipelineError
from components.shared.jsonl import read_json, read_rows, write_json, write_rows


def test_values_come_back_as_they_were_written(tmp_path: Path) -> None:
    """An object is one line, whatever line ends its texts hold; a file read and written again is the same."""
    text = 'aé"\\/\n\r\0\u2028\u0085{},\U0001f600'
    rows: list[dict[str, Any]] = [{text: text, "values": [1, 2.5, None, True, {}, []]}, {}]
    path, first, second = tmp_path / "rows.jsonl", tmp_path / "first.json", tmp_path / "second.json"
    write_rows(path, rows)
    assert [row for _, row in read_rows(path)] == rows
    assert path.read_bytes().count(b"\n") == len(rows)
    write_json(first, rows)
    write_json(second, read_json(first))
    assert second.read_bytes() == first.read_bytes()


def test_empty_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    """Numbers are those an editor shows; a last line needs no end, and a carriage return does no harm."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\r\n\n   \n{"a": 2}')
    assert list(read_rows(path)) == [(1, {"a": 1}), (4, {"a": 2})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', "not valid JSON (Expecting ',' delimiter: line 1 column 8 (char 7)); is the file truncated?"),
        (b'{"a": "caf\xe9"}', "not UTF-8 text (byte 10 of the line)"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"a": ' * 100_000, "not valid JSON (nested too deeply)"),
    ],
)
def test_a_bad_line_is_named_after_the_good_ones_before_it(tmp_path: Path, line: bytes, message: str) -> None:
    """File and line, and what is wrong with it."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line)
    rows = read_rows(path)
    assert next(rows) == (1, {"a": 1})
    with pytest.raises(PipelineError) as refused:
        next(rows)
    assert str(refused.value).startswith(f"{path}:2: {message}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Lines and whole files alike; a folder is no file of lines."""
    path = tmp_path / "nope"
    for read in (lambda: list(read_rows(path)), lambda: read_json(path)):
        with pytest.raises(PipelineError, match=f"^{path}: no such file$"):
            read()
    with pytest.raises(PipelineError, match=f"^{tmp_path}: is a folder, expected a JSON lines file$"):
        list(read_rows(tmp_path))
    with pytest.raises(PipelineError, match=f"^{tmp_path}: is a folder, expected a JSON file$"):
        read_json(tmp_path)


@pytest.mark.parametrize("content", [b'{"a": 1', b"", b'"caf\xe9"', b"[" * 100_000])
def test_a_damaged_json_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Truncated, empty, of another encoding, or made to break the reader."""
    path = tmp_path / "value.json"
    path.write_bytes(content)
    with pytest.raises(PipelineError, match=f"^{path}: not valid JSON; is the file truncated"):
        read_json(path)
