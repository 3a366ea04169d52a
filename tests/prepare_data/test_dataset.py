import json
import math
from pathlib import Path
from typing import Any

import pytest

from components.prepare_data.config import PrepareConfig
from components.prepare_data.dataset import Dataset
from components.prepare_data.hub import find_on_hub
from components.prepare_data.prepare import prepare
from components.prepare_data.source import Fields, MalformedRowError
from components.shared.config import validate
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, read_problems

_COMMIT = "a" * 40
_ID = "someone/sums"
_CARD = """---
configs:
- config_name: easy
  data_files: [{split: train, path: easy/train-*}, {split: test, path: easy/test-*}]
- config_name: hard
  data_files: [{split: exam, path: hard/*}]
---
# Sums
"""
_HUB = {
    "README.md": _CARD.encode(),
    "easy/train-2.jsonl": b'{"question": "1 + 1?", "answer": 2}\n',
    "easy/train-10.jsonl": b'{"question": "1 + 2?", "answer": 3}\n',
    "easy/test-0.jsonl": b'{"question": "1 + 3?", "answer": 4}\n',
    "hard/rows.csv": b"question,answer\n7 + 8?,15\n",
}
"""Files of a dataset with two subsets."""
_SYSTEM, _ASKED = {"role": "system", "content": "S"}, {"role": "user", "content": "Q?"}


def _row(columns: dict[str, Any], **names: str) -> Fields:
    source = Dataset.model_validate({"kind": "dataset", "train": "rows.csv", "columns": names})
    return source.read_row(columns)


@pytest.mark.parametrize(
    ("columns", "names", "expected"),
    [
        ({"prompt": [_SYSTEM, _ASKED], "answer": "1"}, {}, Fields("Q?", "", "1", earlier=(("system", "S"),))),
        (
            {"prompt": json.dumps([_ASKED, {"role": "assistant", "content": "A"}, _ASKED]), "answer": "1"},
            {},
            Fields("Q?", "", "1", earlier=(("user", "Q?"), ("assistant", "A"))),
        ),
        ({"a": "Q?", "b": "72", "answer": "no"}, {"question": "a", "answer": "b"}, Fields("Q?", "", "72")),
        ({"problem": "Q?", "final_answer": 0.1 + 0.2}, {}, Fields("Q?", "", "0.3")),
        # The answer of a solution, as the grader reads it; one that is not declared is added.
        ({"question": "Q?", "answer": math.nan, "solution": "#### 72"}, {}, Fields("Q?", "#### 72", "72")),
        ({"question": "Q?", "solution": r"\boxed{\frac12}."}, {}, Fields("Q?", r"\boxed{\frac12}.", r"\frac12")),
        ({"question": "Q?", "answer": "So\n#### 72"}, {}, Fields("Q?", "So\n#### 72", "72")),
        ({"question": "Q?", "solution": "So 72.\n", "answer": 72}, {}, Fields("Q?", "So 72.\n#### 72", "72")),
        # Topics and levels, where they are some.
        ({"question": "Q?", "answer": "1", "topic": "sums", "level": "Level 3"}, {}, Fields("Q?", "", "1", "sums", 3)),
        ({"question": "Q?", "answer": "1", "topic": ["a"], "difficulty": "hard"}, {}, Fields("Q?", "", "1", "", None)),
        # Conversations, and objects in columns.
        ({"prompt": [_ASKED], "reward": {"gold": 72}}, {"answer": "reward.gold"}, Fields("Q?", "", "72")),
        ({"prompt": "[{x: 1}] has how many keys?", "answer": "1"}, {}, Fields("[{x: 1}] has how many keys?", "", "1")),
    ],
)
def test_columns_are_found_by_name(columns: dict[str, Any], names: dict[str, str], expected: Fields) -> None:
    """A number is taken as its text, without the noise of floating point."""
    assert _row(columns, **names) == expected


@pytest.mark.parametrize(
    ("columns", "names", "reason"),
    [
        ({"question": "Q?", "label": "1"}, {}, "columns: question, label; name one as `columns.answer`"),
        ({"question": " ", "answer": "1"}, {}, "column `question`, the question, is empty"),
        ({"question": "Q?", "n": "", "solution": "#### 1"}, {"answer": "n"}, "column `n`, the answer, is empty"),
        ({"question": "Q?", "answer": ["1", "2"]}, {}, 'column `answer` is ["1", "2"], expected text'),
        ({"question": "Q?", "solution": "So."}, {}, "column `solution` declares no final answer, such as `#### 42`"),
        ({"question": "Q?", "answer": "1", "n": "x"}, {"level": "n"}, 'column `n` is "x", expected a number'),
        ({"prompt": [_SYSTEM, _ASKED, {"role": "assistant"}]}, {}, "last; move the assistant's last message to a"),
    ],
)
def test_row_without_question_or_answer_is_named(columns: dict[str, Any], names: dict[str, str], reason: str) -> None:
    """It lists the columns that there are, so that the right one can be named."""
    with pytest.raises(MalformedRowError) as refused:
        _row(columns, **names)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data/own/my sums_train.jsonl.gz", "my-sums"),
        ("data/sums/train.parquet", "sums"),
        ("train.csv", "dataset"),
        ("AI-MO/NuminaMath-1.5", "NuminaMath-1.5"),
    ],
)
def test_source_is_called_as_its_file_or_dataset(path: str, name: str) -> None:
    """Without the words that name a split."""
    assert Dataset.model_validate({"kind": "dataset", "train": path}).name == name


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"train": "a.csv", "test": "a.csv"}, "`train` and `test` are the same file, a.csv; set test_fraction"),
        ({"train": "a.csv", "test": "b.csv", "test_fraction": 0.1}, "`test` and test_fraction exclude one another"),
        ({"test": "b.csv", "test_fraction": 0.1}, "test_fraction needs a `train` path"),
        ({"train": "b.csv", "test_fraction": 0.5, "dev_fraction": 0.5}, "must leave some of the problems to train on"),
        ({"train": "b.csv", "name": "my sums"}, "is part of ids: accepted are letters, digits"),
        ({"train": "a/b", "test": "a/c", "revision": "v1"}, "revision is of one dataset"),
    ],
)
def test_settings_that_do_not_fit_are_refused(source: dict[str, Any], message: str) -> None:
    """In one line that names the key."""
    with pytest.raises(PipelineError) as refused:
        validate(PrepareConfig, {"sources": [{"kind": "dataset", **source}]}, name="prepare_data")
    assert str(refused.value).startswith("prepare_data.sources.0")
    assert message in str(refused.value)


def _prepare(folder: Path, *sources: dict[str, Any], seed: int = 1) -> dict[Split, list[Problem]]:
    folder.mkdir()
    prepare(PrepareConfig.model_validate({"seed": seed, "sources": sources}), problems=folder)
    return {split: read_problems(folder, split) for split in (Split.TRAIN, Split.TEST)}


def _csv(path: Path, numbers: range) -> str:
    path.write_text("q,a\n" + "".join(f"What is {number} plus 1?,{number + 1}\n" for number in numbers))
    return str(path)


def test_one_file_is_divided_into_train_and_test(tmp_path: Path) -> None:
    """By the seed and the question: the same again, and the same question is never on both sides."""
    path = Path(_csv(tmp_path / "sums.csv", range(100)))
    path.write_text(path.read_text() + "".join(f"what is  {number} plus 1?,{number + 1}\n" for number in range(100)))
    source = {"kind": "dataset", "train": str(path), "columns": {"question": "q", "answer": "a"}, "test_fraction": 0.3}
    first, again = _prepare(tmp_path / "1", source), _prepare(tmp_path / "2", source)
    assert first == again
    assert 30 < len(first[Split.TEST]) < 90
    assert len(first[Split.TRAIN]) + len(first[Split.TEST]) == 200
    assert {each.answer for each in first[Split.TRAIN]}.isdisjoint(each.answer for each in first[Split.TEST])
    assert _prepare(tmp_path / "3", source, seed=2) != first


def test_two_files_of_one_format_are_two_sources(tmp_path: Path) -> None:
    """Their names distinguish them, in ids too."""
    columns = {"question": "q", "answer": "a"}
    small, large, test = (
        _csv(tmp_path / name, range(start, start + 5))
        for name, start in (("small.csv", 0), ("large.csv", 1000), ("test.csv", 50))
    )
    keys = ({"train": small}, {"train": large, "name": "big"}, {"test": test, "name": "exam"})
    sources = [{"kind": "dataset", "columns": columns, **each} for each in keys]
    problems = _prepare(tmp_path / "out", *sources)
    assert [each.source for each in problems[Split.TRAIN]] == ["small"] * 5 + ["big"] * 5
    assert problems[Split.TEST][0].id == "exam/test/00000"
    with pytest.raises(PipelineError, match=r"`big` occurs twice; .*give one another `name`"):
        validate(PrepareConfig, {"sources": [sources[1], {**sources[0], "name": "big"}]}, name="prepare_data")


def test_train_problems_equal_to_the_test_problems_are_an_error(tmp_path: Path) -> None:
    """Before anything is trained on what is left, which is nothing."""
    columns = {"question": "q", "answer": "a"}
    train, test = _csv(tmp_path / "train.csv", range(5)), _csv(tmp_path / "test.csv", range(5))
    source = {"kind": "dataset", "train": train, "test": test, "columns": columns, "name": "sums"}
    message = r"all 5 train problems were removed as contaminated: .*sums/train/00000 as .*`test_fraction`"
    with pytest.raises(PipelineError, match=message):
        _prepare(tmp_path / "out", source)


def test_folder_laid_out_as_on_the_hub_is_read_by_subset_and_split(tmp_path: Path) -> None:
    """As the front matter of its README says, in the order of their numbers; the only split is meant by any name."""
    _write_hub(tmp_path / "sums")
    config = {"kind": "dataset", "train": str(tmp_path / "sums"), "test": str(tmp_path / "sums"), "subset": "easy"}
    problems = _prepare(tmp_path / "out", config)
    assert [(each.id, each.answer) for each in problems[Split.TRAIN]] == [
        ("sums/train/easy/train-2/00000", "2"),
        ("sums/train/easy/train-10/00000", "3"),
    ]
    assert [each.answer for each in problems[Split.TEST]] == ["4"]
    (entry, _) = json.loads((tmp_path / "out/manifest.json").read_text())["raw_files"]
    assert len(entry["sha256"]) == 64
    only = Dataset.model_validate({"kind": "dataset", "test": str(tmp_path / "sums"), "subset": "hard"})
    assert [row.answer for row in only.read(Split.TEST, Path()) if isinstance(row, Problem)] == ["15"]
    for change, message in (
        ({"subset": None}, "has several subsets; set `subset` to one of: easy, hard"),
        ({"subset": "nope"}, "has no subset `nope`; set `subset` to one of: easy, hard"),
        ({"test_split": "dev"}, "has no split `dev`; set `test_split` to one of: train, test"),
    ):
        with pytest.raises(PipelineError, match=message):
            prepare(PrepareConfig.model_validate({"sources": [config | change]}), problems=tmp_path / "out")


def _write_hub(folder: Path, names: tuple[str, ...] = tuple(_HUB)) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(_HUB[name])


def test_cached_dataset_of_the_hub_is_read_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the commit that `main` was; another subset is not in the cache, nor is another dataset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    find_on_hub.cache_clear()
    cached = tmp_path / "cache/datasets--someone--sums"
    _write_hub(cached / "snapshots" / _COMMIT, tuple(name for name in _HUB if not name.startswith("hard")))
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(_COMMIT)
    config = {"kind": "dataset", "train": _ID, "test": _ID, "subset": "easy"}
    problems = _prepare(tmp_path / "out", config)
    assert [each.answer for each in problems[Split.TRAIN]] == ["2", "3"]
    (entry, _) = json.loads((tmp_path / "out/manifest.json").read_text())["raw_files"]
    assert (entry["path"], entry["repository"], entry["commit"]) == (f"{_ID}@main", f"datasets/{_ID}", _COMMIT)
    with pytest.raises(PipelineError, match="sums: has no file of the split `exam` here"):
        prepare(PrepareConfig.model_validate({"sources": [config | {"subset": "hard"}]}), problems=tmp_path / "out")
    with pytest.raises(PipelineError, match=r"someone/other: neither a file or folder .*HF_HUB_OFFLINE is set"):
        prepare(PrepareConfig.model_validate({"sources": [config | {"train": "someone/other"}]}), problems=tmp_path)
