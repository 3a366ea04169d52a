"""GSM8K rows: what their final answers become and which rows are refused."""

import json
from pathlib import Path

import pytest

from components.grading.verifier import Verifier
from components.prepare_data.gsm8k import GSM8K
from components.prepare_data.source import Fields, MalformedRowError

_DATA = Path("../shared/data")
_SOURCE = GSM8K(kind="gsm8k", train=Path("train.jsonl"))


def gsm8k_fields(columns: dict[str, object]) -> Fields:
    """The problem in one row."""
    return _SOURCE.read_row(columns, Verifier())


@pytest.mark.parametrize(
    ("final", "answer"),
    [
        ("72", "72"),
        ("1,080", "1080"),
        ("1,234,567", "1234567"),
        ("-3", "-3"),
        ("-1,000", "-1000"),
        ("2.5", "2.5"),
        ("0", "0"),
    ],
)
def test_the_answer_is_the_number_after_the_mark(final: str, answer: str) -> None:
    """Thousands commas go, signs and decimals stay, and the solution is kept to the letter."""
    solution = f"She sold 48/2 = <<48/2=24>>24 clips, 1,000 in all.\n#### {final}"
    fields = gsm8k_fields({"question": "How many?", "answer": solution})
    assert (fields.question, fields.solution, fields.answer) == ("How many?", solution, answer)
    assert (fields.subject, fields.level) == ("", None)


def test_the_text_before_the_mark_does_not_count() -> None:
    """Where text and final answer disagree, as in one published row, the final answer stands."""
    assert gsm8k_fields({"question": "?", "answer": "48+16=64\n#### 66"}).answer == "66"
    assert gsm8k_fields({"question": "?", "answer": "#### Step 1\n48+16=64\n#### 64"}).answer == "64"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"answer": "#### 1"}, "column `question` is missing"),
        ({"question": None, "answer": "#### 1"}, "column `question` is missing"),
        ({"question": " ", "answer": "#### 1"}, "column `question` is empty"),
        ({"question": 7, "answer": "#### 1"}, "column `question` is 7, expected text"),
        ({"question": "\ud800", "answer": "#### 1"}, "column `question` contains half a surrogate pair"),
        ({"question": "?"}, "column `answer` is missing"),
        ({"question": "?", "answer": "just 5"}, "column `answer` has no `####`"),
        ({"question": "?", "answer": "so\n#### "}, "column `answer` has nothing after its `####`"),
        ({"question": "?", "answer": "#### five"}, 'the final answer "five" is not a number'),
        ({"question": "?", "answer": "#### 1,2"}, 'the final answer "1,2" is not a number'),
    ],
)
def test_unusable_rows_say_what_is_wrong(columns: dict[str, object], reason: str) -> None:
    """Each reason names the column and what was found."""
    with pytest.raises(MalformedRowError) as refused:
        gsm8k_fields(columns)
    assert reason in str(refused.value)


@pytest.mark.skipif(not _DATA.is_dir(), reason="the published GSM8K files are not at hand")
@pytest.mark.parametrize(("split", "rows", "commas", "negative"), [("train", 7473, 79, 3), ("test", 1319, 14, 2)])
def test_every_published_row_has_an_integer_answer(split: str, rows: int, commas: int, negative: int) -> None:
    """All rows are read, and the known odd ones are as many as they are known to be."""
    lines = (_DATA / f"gsm8k_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    fields = [gsm8k_fields(json.loads(line)) for line in lines]
    assert len(fields) == rows
    assert sum("," in field.solution.rpartition("####")[2] for field in fields) == commas
    assert sum(int(field.answer) < 0 for field in fields) == negative
