"""Problems: written and read without loss, and refused by line and field."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, problems_file, read_problems, write_problems

_VALUES: dict[str, Any] = {
    "id": "gsm8k/train/00001",
    "source": "gsm8k",
    "split": "train",
    "question": "What is 2 + 2?\u2028Mind the line separator, é and \\boxed{}.",
    "solution": "2 + 2 = 4\n#### 4",
    "answer": "4",
    "subject": "",
    "level": None,
}


def test_problems_come_back_in_their_order(tmp_path: Path) -> None:
    """Each split in a file of its own, one compact line per problem, readable in any language."""
    problems = [Problem.model_validate(_VALUES | {"id": str(number), "level": number}) for number in (3, 1, 2)]
    write_problems(tmp_path, Split.TRAIN, problems)
    write_problems(tmp_path, Split.TEST, [Problem.model_validate(_VALUES)])
    assert read_problems(tmp_path, Split.TRAIN) == problems
    line = (tmp_path / "test.jsonl").read_text(encoding="utf-8")
    assert line == json.dumps(_VALUES, ensure_ascii=False) + "\n"


def test_a_split_without_problems_is_an_error(tmp_path: Path) -> None:
    """Training on nothing would succeed."""
    problems_file(tmp_path, Split.TRAIN).touch()
    with pytest.raises(PipelineError, match=r"train\.jsonl: holds no problem$"):
        read_problems(tmp_path, Split.TRAIN)
