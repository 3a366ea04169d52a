"""What datasets in files share: limits, folders of files, and columns without a text."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from components.prepare_data.source import Fields, FileSource, MalformedRow, MalformedRowError, text, text_or_number
from components.shared.problem import Problem, Split


class _Notes(FileSource):
    kind: Literal["notes"] = "notes"

    def read_row(self, columns: dict[str, Any]) -> Fields:
        return Fields(text(columns, "text", "prompt"), "", "1")


def _read(root: Path, path: str, **settings: Any) -> list[Problem | MalformedRow]:
    return list(_Notes(train=Path(path), **settings).read(Split.TRAIN, root))


def _problems(root: Path, path: str, **settings: Any) -> list[tuple[str, str]]:
    rows = _read(root, path, **settings)
    return [(row.id, row.question) for row in rows if isinstance(row, Problem)]


def test_a_split_is_read_up_to_its_limit(tmp_path: Path) -> None:
    """A row that cannot be used does not count."""
    rows = ["{}", *(f'{{"prompt": "question {index}"}}' for index in range(3))]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert [name for name, _ in _problems(tmp_path, "rows.jsonl", train_limit=2)] == [
        "notes/train/00001",
        "notes/train/00002",
    ]


def test_folder_is_read_by_subject_and_number(tmp_path: Path) -> None:
    """One JSON file per problem, of any layout inside; 2.json comes before 10.json, and other files are ignored."""
    for name in ("algebra/10", "algebra/2", "geometry/1"):
        (tmp_path / "all" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / f"all/{name}.json").write_text(json.dumps({"prompt": name}, indent=2), encoding="utf-8")
    (tmp_path / "all/geometry/7.json").write_text("{}")
    (tmp_path / "all/README.md").write_text("no problem")
    names = ["algebra/2", "algebra/10", "geometry/1"]
    assert _problems(tmp_path, "all") == [(f"notes/train/{name}", name) for name in names]
    assert _read(tmp_path, "all")[-1][:2] == (Path("all/geometry/7.json"), 1)  # type: ignore[index]


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
