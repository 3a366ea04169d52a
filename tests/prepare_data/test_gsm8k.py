"""GSM8K rows: their final answers, and which rows are malformed."""

from pathlib import Path

import pytest

from components.grading.verifier import Verifier
from components.prepare_data.gsm8k import GSM8K
from components.prepare_data.source import Fields, MalformedRowError


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


def test_text_before_the_last_mark_does_not_count() -> None:
    """A mark that is no final answer, and a calculation that contradicts it, as in one published row."""
    assert read({"question": "?", "answer": "#### Step 1\n48+16=64\n#### 66"}).answer == "66"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"answer": "#### 1"}, "column `question` is missing"),
        ({"question": "?"}, "column `answer` is missing"),
        ({"question": "?", "answer": "just 5"}, "column `answer` has no `####`"),
        ({"question": "?", "answer": "so\n#### "}, 'the final answer "" is not a number'),
        ({"question": "?", "answer": "#### five"}, 'the final answer "five" is not a number'),
        ({"question": "?", "answer": "#### 1,2"}, 'the final answer "1,2" is not a number'),
    ],
)
def test_malformed_row_has_a_reason(columns: dict[str, object], reason: str) -> None:
    """Each reason names the column and its content."""
    with pytest.raises(MalformedRowError) as refused:
        read(columns)
    assert reason in str(refused.value)
