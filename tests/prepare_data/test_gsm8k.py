"""GSM8K rows: their final answers, and which rows are malformed."""

import json
from pathlib import Path

import pytest

from components.grading.verifier import Verifier
from components.prepare_data.gsm8k import GSM8K
from components.prepare_data.source import Fields, MalformedRowError

_DATA = Path("../shared/data")


def read(columns: dict[str, object]) -> Fields:
    """The problem in one row."""
    return GSM8K(kind="gsm8k", train=Path("train.jsonl")).read_row(columns, Verifier())


@pytest.mark.parametrize(
    ("final", "answer"), [("72", "72"), ("1,234,567", "1234567"), ("-1,000", "-1000"), ("2.5", "2.5"), ("0", "0")]
)
def test_answer_is_the_number_after_the_mark(final: str, answer: str) -> None:
    """Thousands commas go, signs and decimals stay, and the solution is kept to the letter."""
    solution = f"She sold 48/2 = <<48/2=24>>24 clips, 1,000 in all.\n#### {final}"
    assert read({"question": "How many?", "answer": solution}) == Fields("How many?", solution, answer, "", None)


@pytest.mark.parametrize(
    ("solution", "answer"), [("48+16=64\n#### 66", "66"), ("#### Step 1\n48+16=64\n#### 64", "64")]
)
def test_text_before_the_last_mark_does_not_count(solution: str, answer: str) -> None:
    """If text and final answer disagree, as in one published row, the final answer counts."""
    assert read({"question": "?", "answer": solution}).answer == answer


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"answer": "#### 1"}, "column `question` is missing"),
        ({"question": "?"}, "column `answer` is missing"),
        ({"question": "?", "answer": "just 5"}, "column `answer` has no `####`"),
        ({"question": "?", "answer": "so\n#### "}, "column `answer` has nothing after its `####`"),
        ({"question": "?", "answer": "#### five"}, 'the final answer "five" is not a number'),
        ({"question": "?", "answer": "#### 1,2"}, 'the final answer "1,2" is not a number'),
    ],
)
def test_malformed_row_has_a_reason(columns: dict[str, object], reason: str) -> None:
    """Each reason names the column and its content."""
    with pytest.raises(MalformedRowError) as refused:
        read(columns)
    assert reason in str(refused.value)


@pytest.mark.skipif(not _DATA.is_dir(), reason="the published GSM8K files are not here")
@pytest.mark.parametrize(("split", "rows", "commas", "negative"), [("train", 7473, 79, 3), ("test", 1319, 14, 2)])
def test_every_published_row_has_an_integer_answer(split: str, rows: int, commas: int, negative: int) -> None:
    """All rows are read, and the known odd ones are as many as they are known to be."""
    lines = (_DATA / f"gsm8k_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    fields = [read(json.loads(line)) for line in lines]
    assert len(fields) == rows
    assert sum("," in each.solution.rpartition("####")[2] for each in fields) == commas
    assert sum(int(each.answer) < 0 for each in fields) == negative
