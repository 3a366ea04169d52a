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


def _refusal(folder: Path, *rows: dict[str, Any]) -> str:
    path = problems_file(folder, Split.TRAIN)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(PipelineError) as refused:
        read_problems(folder, Split.TRAIN)
    return str(refused.value).removeprefix(str(path))


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
    assert _refusal(tmp_path) == ": holds no problem"
    with pytest.raises(PipelineError, match=r"test\.jsonl: no such file$"):
        read_problems(tmp_path, Split.TEST)
