import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import main

COMMAND = [sys.executable, "-c", "from pipelines.cli import main; raise SystemExit(main())", "grade", "-"]
RIGHT = {"verdict": "right", "extracted": "5", "reason": "same text"}


def line(gold: str, response: str, **others: Any) -> str:
    """One line of a file of responses."""
    return json.dumps({"gold": gold, "response": response} | others) + "\n"


def written(folder: Path, *lines: str) -> str:
    """A file of those lines."""
    path = folder / "responses.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def grades(out: str) -> list[Any]:
    """The printed grades."""
    return [json.loads(printed) for printed in out.splitlines()]


def test_each_line_has_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, with nothing else on standard output; the counts are on standard error."""
    lines = [
        line("5", "#### 5", id=7),
        line("5", r"It is \boxed{6}."),
        "\n",
        line("5", "No idea"),
        line("", "#### 5"),
        line("5", "#### 5").rstrip("\n"),
    ]
    assert main(["grade", written(tmp_path, *lines)]) == 0
    out, err = capsys.readouterr()
    printed = grades(out)
    assert [each["verdict"] for each in printed] == ["right", "wrong", "wrong", "unscorable", "right"]
    assert [each["extracted"] for each in printed] == ["5", "6", None, "5", "5"]
    assert printed[0] == RIGHT
    assert all(each["reason"] for each in printed)
    assert err == "2 right, 2 wrong, 1 unscorable\n"


def test_the_answer_policy_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a box counts where it is asked for."""
    path = written(tmp_path, line("5", "The answer is 5."), line("5", r"\boxed{5}"), line("5", "#### 5"))
    assert main(["grade", path, "--answer", "boxed"]) == 0
    assert [each["verdict"] for each in grades(capsys.readouterr().out)] == ["wrong", "right", "wrong"]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ('{"gold": "5", "resp', "not valid JSON"),
        ('{"gold": "5"}', "`response` is missing"),
        ('{"gold": 5, "response": "5"}', "`gold` is 5, not a string"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str, problem: str) -> None:
    """With its file, its number and what is accepted; verdicts on the lines before it are out."""
    path = written(tmp_path, line("5", "#### 5"), "\n", bad + "\n", line("5", "#### 5"))
    assert main(["grade", path]) == 2
    out, err = capsys.readouterr()
    assert grades(out) == [RIGHT]
    assert err.startswith(f"error: {path}:3: {problem}")
    assert err.endswith(
        "; expected one JSON object per line, with the strings `gold` and `response`, and `question` if it is known\n"
    )
    assert err.count("\n") == 1


def test_a_file_without_responses_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program that was to write them has failed, and a script must not take that for a result."""
    path = written(tmp_path, "\n", "  \n")
    assert main(["grade", path]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: has no responses; expected one JSON object per line, ")


def test_lines_may_be_of_any_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Short ones, megabytes, and many, regardless of how much is read at once."""
    lengths = [3_000_000, 10, 1 << 20, (1 << 20) - 60, *[700] * 3000]
    lines = [line(str(number), f"{'x' * length}\n#### {number}") for number, length in enumerate(lengths)]
    assert main(["grade", written(tmp_path, *lines)]) == 0
    assert [each["extracted"] for each in grades(capsys.readouterr().out)] == [str(n) for n in range(len(lengths))]


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


def test_a_verdict_can_be_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was extracted, how both sides were read, and the rule that decided."""
    lines = [
        line("26000", r"It is \boxed{513^2 - 487^2}.", question="Compute $513^2 - 487^2$."),
        line("5", "No idea"),
        line("(1, 2)", r"\boxed{(1,3)}"),
    ]
    assert main(["grade", "--explain", written(tmp_path, *lines)]) == 0
    echo, none, pair = capsys.readouterr().out.strip().split("\n\n")
    assert "extracted nothing" in none
    assert "and as    tuple of 2: 1 ; 3" in pair
    assert echo.splitlines() == [
        "verdict   wrong: echoes the question",
        "expected  26000",
        "extracted 513^2 - 487^2",
        "read as   the number 26000",
        "and as    expression 513^2 - 487^2",
        "rule      The answer is an expression of the question, and not in the expected form.",
    ]
