import csv
import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet
import pytest

from components.prepare_data.rows import RawFile, count_rows, read_rows
from components.prepare_data.source import Fields, FileSource, MalformedRow, MalformedRowError, text, text_or_number
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split

_ROWS: list[dict[str, str | None]] = [
    {"question": 'Two lines,\na comma and a "quote"', "answer": "007"},
    {"question": "Wieviel ist 1½ + ½?", "answer": "2.50"},
    {"question": "No answer", "answer": None},
]
BOMB = gzip.compress(b" " * 2**27, mtime=0)
"""A small file of which 128 MiB come."""


def _json_lines(path: Path, encoding: str = "utf-8") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in _ROWS), encoding=encoding)


def _json(path: Path, encoding: str = "utf-8") -> None:
    path.write_text(json.dumps(_ROWS, indent=1), encoding=encoding)


def _delimited(path: Path, delimiter: str, encoding: str, line_end: str) -> None:
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, ["question", "answer"], delimiter=delimiter, lineterminator=line_end)
        writer.writeheader()
        for row in _ROWS:
            writer.writerow({name: (value or "").replace("\n", line_end) for name, value in row.items()})


def _parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_ROWS), path)


_WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "JSON lines": ("rows.jsonl", _json_lines),
    "JSON lines named JSON": ("rows.json", _json_lines),
    "JSON array": ("rows.json", _json),
    "JSON lines with a byte order mark": ("rows.jsonl", partial(_json_lines, encoding="utf-8-sig")),
    "JSON array with a byte order mark": ("rows.json", partial(_json, encoding="utf-8-sig")),
    "parquet": ("rows.parquet", _parquet),
    "CSV": ("rows.csv", lambda path: _delimited(path, ",", "utf-8", "\n")),
    "CSV of a spreadsheet": ("rows.csv", lambda path: _delimited(path, ";", "utf-8-sig", "\r\n")),
    "CSV in capitals": ("ROWS.CSV", lambda path: _delimited(path, ",", "utf-16", "\r\n")),
    "TSV": ("rows.tsv", lambda path: _delimited(path, "\t", "utf-8", "\n")),
}


def _read(path: Path) -> list[Any]:
    return list(read_rows(RawFile(path, Path(path.name))))


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", _WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, compressed: bool) -> None:
    """Text stays text, whatever it looks like; an empty cell is no value; names are numbers from 0."""
    file, write = _WRITERS[name]
    path = tmp_path / file
    write(path)
    if compressed:
        path = path.with_name(f"{file}.gz")
        path.write_bytes(gzip.compress((tmp_path / file).read_bytes()))
    rows = _read(path)
    assert [row.columns for row in rows] == _ROWS
    assert [row.name for row in rows] == ["00000", "00001", "00002"]
    assert count_rows(RawFile(path, path)) == 3


def test_numbers_of_single_precision_are_the_decimals_that_they_stand_for(tmp_path: Path) -> None:
    """0.1 is 0.10000000149 in double precision, which nobody wrote."""
    table = pyarrow.table({"answer": pyarrow.array([0.1, None, 72.0], pyarrow.float32())})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert [row.columns["answer"] for row in _read(tmp_path / "rows.parquet")] == [0.1, None, 72.0]


@pytest.mark.parametrize(
    ("name", "content", "place", "reason"),
    [
        ("a.csv", b'q,a\n1,2\n"x\ny",2\n1,2,3\n', 5, "has 3 fields, and the header has 2"),
        ("a.json", b'[{"a": 1}, 2]', 2, "expected a JSON object, got int"),
        ("a.json", b'{"a": 1}\n{"a": ', 2, "not valid JSON"),
        ("a.jsonl", b"question,answer\n", 1, "not valid JSON"),
    ],
)
def test_row_that_is_none_has_its_line(tmp_path: Path, name: str, content: bytes, place: int, reason: str) -> None:
    """The others are rows all the same."""
    (tmp_path / name).write_bytes(content)
    last = _read(tmp_path / name)[-1]
    assert (last.columns, last.line) == (None, place)
    assert last.reason.startswith(reason)
    assert "truncated" not in last.reason


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xlsx", b"PK\x03\x04", r"a\.xlsx: is of no format that can be read; accepted: JSON lines \(\.jsonl\)"),
        ("a.csv", b"", r"a\.csv: is empty; its first line has to name the columns"),
        ("a.csv", b"q,q\n1,2\n", r'a\.csv:1: two columns are named "q"'),
        ("a.csv", b'q,a\n1,2\n"x,2\n', r"a\.csv:3: not valid CSV \(unexpected end of data\)"),
        ("a.csv", b"q,a\ncaf\xe9,2\n", r"a\.csv: not UTF-8 text .*; save it as UTF-8"),
        ("a.json", b'[{"a": 1}', r"a\.json: not a valid JSON array"),
        ("a.jsonl.gz", b'{"a": 1}', r"a\.jsonl\.gz: not a gzip file that can be read"),
        ("a.csv.gz", gzip.compress(b"q,a\n" + b"1,2\n" * 9, mtime=0)[:-9], r"a\.csv\.gz: not a gzip file that can"),
        ("a.jsonl.gz", BOMB, r"a\.jsonl\.gz: .*its content is more than 100 times as large"),
        ("a.parquet.gz", BOMB, r"a\.parquet\.gz: .* more than 100 times as large"),
        ("a.parquet", b"PAR1", r"a\.parquet: not a readable parquet file .*is it truncated"),
    ],
)
def test_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """With the file, what is wrong, and what is accepted."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PipelineError, match=f"^{message}") as refused:
        _read(tmp_path / name)
    assert "\n" not in str(refused.value)


class _Notes(FileSource):
    kind: Literal["notes"] = "notes"

    def read_row(self, columns: dict[str, Any]) -> Fields:
        return Fields(text(columns, "text", "prompt"), "", "1")


def _read_split(root: Path, path: str, **settings: Any) -> list[Problem | MalformedRow | None]:
    return list(_Notes(train=Path(path), **settings).read(Split.TRAIN, root))


def _problems(root: Path, path: str, **settings: Any) -> list[tuple[str, str]]:
    rows = _read_split(root, path, **settings)
    return [(row.id, row.question) for row in rows if isinstance(row, Problem)]


def test_a_split_is_read_up_to_its_limit(tmp_path: Path) -> None:
    """A row that cannot be used does not count."""
    rows = ["{}", *(f'{{"prompt": "question {index}"}}' for index in range(3))]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    problems = _problems(tmp_path, "rows.jsonl", train_limit=2)
    assert [name for name, _ in problems] == ["notes/train/00001", "notes/train/00002"]


def test_folder_is_read_by_subject_and_number(tmp_path: Path) -> None:
    """One JSON file per problem, of any layout inside; 2.json comes before 10.json, and other files are ignored."""
    for name in ("algebra/10", "algebra/2", "geometry/1"):
        (tmp_path / "all" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / f"all/{name}.json").write_text(json.dumps({"prompt": name}, indent=2), encoding="utf-8")
    (tmp_path / "all/geometry/7.json").write_text("{}")
    (tmp_path / "all/README.md").write_text("no problem")
    names = ["algebra/2", "algebra/10", "geometry/1"]
    assert _problems(tmp_path, "all") == [(f"notes/train/{name}", name) for name in names]
    assert _read_split(tmp_path, "all")[-1][:2] == (Path("all/geometry/7.json"), 1)  # type: ignore[index]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "column `text` or `prompt` is missing"),
        (" ", "column `prompt` is empty"),
        (["x" * 1000], f'column `prompt` is ["{"x" * 38}..., expected text'),
        ("\ud800", "column `prompt` contains half a surrogate pair"),
    ],
)
def test_column_without_text_is_malformed(value: Any, reason: str) -> None:
    """The reason names the column and what is wrong with it."""
    with pytest.raises(MalformedRowError) as refused:
        text({"prompt": value}, "text", "prompt")
    assert reason in str(refused.value)


@pytest.mark.parametrize("answer", [10**400 + 1, -(10**30) - 1, [7]], ids=["long", "negative", "list"])
def test_whole_numbers_of_any_length_are_answers(answer: Any) -> None:
    """Digit by digit; a list of one answer, as data for several rewards have it, is that answer."""
    assert text_or_number({"answer": answer}, "answer") == str(answer).strip("[]")
