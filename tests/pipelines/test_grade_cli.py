import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from pipelines.grade import _batches
from tests.pipelines.conftest import Program

COMMAND = [sys.executable, "-c", "from pipelines.cli import main; raise SystemExit(main())", "grade", "-"]
RIGHT = {"verdict": "right", "extracted": "5", "reason": "same text"}
ACCEPTED = "expected one JSON object per line, with the strings `gold` and `response`, and `question` if it is known"


def line(gold: str, response: str, **others: Any) -> str:
    """One line of a file of responses."""
    return json.dumps({"gold": gold, "response": response} | others) + "\n"


def test_each_line_has_its_verdict(tmp_path: Path, program: Program) -> None:
    """In order, with nothing else on standard output; the counts are on standard error."""
    path = tmp_path / "responses.jsonl"
    lines = [line("5", "#### 5", id=7), line("5", r"It is \boxed{6}."), "\n", line("5", "No idea"), line("", "#### 5")]
    path.write_text("".join([*lines, line("5", "#### 5").rstrip("\n")]))
    lines, error = program("grade", str(path))
    printed = [json.loads(each) for each in lines]
    assert [each["verdict"] for each in printed] == ["right", "wrong", "wrong", "unscorable", "right"]
    assert [each["extracted"] for each in printed] == ["5", "6", None, "5", "5"]
    assert printed[0] == RIGHT
    assert all(each["reason"] for each in printed)
    assert error == "2 right, 2 wrong, 1 unscorable\n"


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ('{"gold": "5", "resp', "not valid JSON"),
        ('{"gold": "5"}', "`response` is missing"),
        ('{"gold": 5, "response": "5"}', "`gold` is 5, not a string"),
    ],
)
def test_a_bad_line_is_named(bad: str, problem: str) -> None:
    """With its file, its number and what is accepted; the lines before it are graded first."""
    content = "".join([line("5", "#### 5"), "\n", bad + "\n", line("5", "#### 5")])
    batches = _batches(io.BytesIO(content.encode()), "file", AnswerPolicy.STATED)
    assert [each.gold for each in next(batches)] == ["5"]
    with pytest.raises(PipelineError, match=rf"^file:3: {problem}.*; {ACCEPTED}$"):
        next(batches)


def test_lines_may_be_of_any_length() -> None:
    """Short ones, megabytes, and many, regardless of how much is read at once."""
    lengths = [3_000_000, 10, 1 << 20, (1 << 20) - 60, *[700] * 3000]
    content = "".join(line(str(number), "x" * length) for number, length in enumerate(lengths))
    batches = list(_batches(io.BytesIO(content.encode()), "file", AnswerPolicy.STATED))
    assert [int(each.gold) for batch in batches for each in batch] == list(range(len(lengths)))
    assert len(batches) > 5


def test_a_file_without_responses_is_an_error(tmp_path: Path, program: Program) -> None:
    """The program that was to write them has failed, and a script must not take that for a result."""
    path = tmp_path / "empty.jsonl"
    path.write_text("\n  \n")
    assert program("grade", str(path), code=2).error == f"error: {path}: has no responses; {ACCEPTED}\n"


def test_verdicts_do_not_wait_for_the_end_of_the_input() -> None:
    """Each response is graded as it arrives."""
    pipe = subprocess.PIPE
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(COMMAND, text=True, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        for _ in range(2):
            running.stdin.write(line("5", "#### 5"))
            running.stdin.flush()
            assert json.loads(running.stdout.readline()) == RIGHT
        out, err = running.communicate("5\n")
    assert (out, running.returncode) == ("", 2)
    assert err.startswith("error: standard input:3: expected a JSON object")


def test_a_verdict_can_be_explained(tmp_path: Path, program: Program) -> None:
    """What was extracted, how both sides were read, and the rule that decided; where only a box counts, not a line."""
    lines = [
        line("26000", r"It is \boxed{513^2 - 487^2}.", question="Compute $513^2 - 487^2$."),
        line("5", "#### 5"),
        line("(1, 2)", r"\boxed{(1,3)}"),
        line("12 cm", r"\boxed{12 m}"),
    ]
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(lines))
    echo, none, pair, units = program("grade", "--explain", "--answer", "boxed", str(path)).out.strip().split("\n\n")
    assert "extracted nothing" in none
    assert "read as   tuple with 2 parts: 1 ; 3" in pair
    assert re.findall("read as   (.*)", units) == ["the number 12 times 1/100 (length)", "the number 12 (length)"]
    assert echo.splitlines() == [
        "verdict   wrong: echoes the question",
        "expected  26000",
        "read as   the number 26000",
        "extracted 513^2 - 487^2",
        "read as   the expression `513^2 - 487^2`",
        "rule      The answer repeats an expression of the question, and is not in the expected form.",
    ]
