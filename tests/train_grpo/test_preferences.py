import csv
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from components.shared import lineage
from components.shared.errors import PipelineError
from components.shared.lineage import Material
from components.train_grpo.preferences import Preference, read_preferences
from components.train_grpo.train import STAGE
from tests.train_grpo.settings import reward_model_config

_ROWS = [
    {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    {"prompt": "2+2?", "chosen": "4", "rejected": '5, "or\nso"'},
]


def _json_lines(rows: list[dict[str, Any]], folder: Path) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _json(rows: list[dict[str, Any]], folder: Path) -> Path:
    path = folder / "pairs.json"
    path.write_text(json.dumps(rows))
    return path


def _separated(delimiter: str, suffix: str) -> Callable[[list[dict[str, Any]], Path], Path]:
    def write(rows: list[dict[str, Any]], folder: Path) -> Path:
        path = folder / f"pairs{suffix}"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


def _parquet(rows: list[dict[str, Any]], folder: Path) -> Path:
    Dataset.from_list(rows).to_parquet(folder / "pairs.parquet")
    return folder / "pairs.parquet"


def _saved(rows: list[dict[str, Any]], folder: Path) -> Path:
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(folder / "pairs")
    return folder / "pairs"


@pytest.mark.parametrize(
    "write",
    [_json_lines, _json, _separated(",", ".csv"), _separated("\t", ".tsv"), _parquet, _saved],
    ids=["json lines", "json", "csv", "tsv", "parquet", "a saved data set"],
)
@pytest.mark.parametrize("prompt", ["prompt", "question"])
def test_pairs_are_read_from_every_kind_of_file(
    tmp_path: Path, write: Callable[[list[dict[str, Any]], Path], Path], prompt: str
) -> None:
    """In the order of the file; other columns do no harm."""
    rows = [{"id": 7, prompt: row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"]} for row in _ROWS]
    assert read_preferences(write(rows, tmp_path)) == [Preference(*row.values()) for row in _ROWS]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: folder / "none.jsonl", "none.jsonl: no such file or folder"),
        (lambda folder: _json_lines(_ROWS[:1], folder), "pairs.jsonl: has 1 of the 2 pairs or more"),
        (lambda folder: _json_lines([], folder), "pairs.jsonl: has 0 of the 2 pairs or more"),
        (
            lambda folder: _json_lines([*_ROWS, {"prompt": "1", "chosen": "2"}], folder),
            "pairs.jsonl:3: lacks the column rejected; it has prompt, chosen",
        ),
        (
            lambda folder: _parquet([{"text": "1", "chosen": "2", "rejected": "3"}], folder),
            "pairs.parquet: row 1: lacks the column prompt or question; it has text, chosen, rejected",
        ),
        (
            lambda folder: _json_lines([{**_ROWS[0], "chosen": [{"role": "assistant"}]}], folder),
            "pairs.jsonl:1: chosen is of type list; text is expected",
        ),
        (
            lambda folder: _separated(",", ".csv")([{**_ROWS[0], "rejected": " "}], folder),
            "pairs.csv:2: rejected is empty; text is expected",
        ),
        (
            lambda folder: _json_lines([{**_ROWS[0], "rejected": "2"}], folder),
            "pairs.jsonl:1: chosen and rejected are the same text",
        ),
        (lambda folder: _broken(folder / "pairs.jsonl"), "pairs.jsonl:1: not valid JSON"),
        (lambda folder: _broken(folder / "pairs.parquet"), "pairs.parquet: cannot be read"),
        (lambda folder: _broken(folder / "pairs.xlsx"), "pairs.xlsx: is of an unknown kind; accepted: .jsonl, "),
        (lambda folder: folder, "cannot be read"),
    ],
)
def test_a_file_without_pairs_is_named_with_the_row(
    tmp_path: Path, write: Callable[[Path], Path], message: str
) -> None:
    """In one line that begins with the key."""
    with pytest.raises(PipelineError, match=re.escape(message)) as raised:
        read_preferences(write(tmp_path))
    assert re.match(r"train_grpo\.reward\.model\.preferences: .*[^\n]*$", str(raised.value))
    assert "\n" not in str(raised.value)


def test_the_file_is_a_material_of_the_policy(tmp_path: Path) -> None:
    """Its digest is in the lineage, so that a version says what its reward model learned from."""
    path = _json_lines(_ROWS, tmp_path)
    materials = STAGE.sources(reward_model_config(preferences=str(path)))
    assert materials[str(path)].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_first_reward_model_is_a_material_of_the_policy(tmp_path: Path) -> None:
    """A folder by its content: a policy is not taken from an earlier run whose reward model was another one."""
    (tmp_path / "config.json").write_text("{}")
    materials = STAGE.sources(reward_model_config(base=str(tmp_path)))
    assert materials == {str(tmp_path): Material(sha256=lineage.digest(tmp_path))}
    assert STAGE.sources(reward_model_config()) == {}


def _broken(path: Path) -> Path:
    path.write_text("{")
    return path
