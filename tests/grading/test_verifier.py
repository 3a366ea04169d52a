import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from components.grading.verifier import Grade, Submission, Verdict, Verifier, grade
from components.shared.answer_policy import AnswerPolicy

MATH = Path("../shared/data/math500.jsonl")
TOWER = r"\boxed{9^{9^{9^{9}}}}"
TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0"


@pytest.fixture(scope="module")
def verify() -> Iterator[Verifier]:
    """A verifier as the stages make it."""
    with Verifier() as verify:
        yield verify


def boxed(gold: str, answer: str) -> Submission:
    """A response that is an answer in a box."""
    return Submission(gold, rf"\boxed{{{answer}}}", AnswerPolicy.BOXED)


def test_a_verdict_is_that_of_the_grader(verify: Verifier) -> None:
    """Workers say what the grader says in this process, by the policy of each submission."""
    texts = ["so\n#### 72", r"\boxed{72}", "The answer is 72.", r"\boxed{71}", r"\boxed{x+\frac12}", "\ud800", ""]
    submissions = [
        Submission(gold, text, policy)
        for gold in ("72", r"\frac12+x", "", r"\frac{")
        for text in texts
        for policy in AnswerPolicy
    ]
    assert verify(submissions) == [grade(each.gold, each.response, each.policy) for each in submissions]


def test_no_submission_pays_for_the_imports() -> None:
    """The first to need algebra are right within a deadline that is shorter than it takes to get ready for it."""
    with Verifier(num_workers=1, deadline_s=0.2) as verify:
        grades = verify([boxed("1", "1"), boxed(r"x+\frac{1}{2}", r"\frac12+x"), boxed(r"2\sqrt{5}", r"\sqrt{20}")])
        assert [grade.verdict for grade in grades] == [Verdict.RIGHT] * 3


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "10000000!", r"\sqrt{10^{10^{10}}}"])
def test_an_answer_built_to_hang_comes_to_an_end(verify: Verifier, answer: str) -> None:
    """It is not right, and the answers around it are graded."""
    before, hung, after = verify([boxed("1", "1"), boxed("1", answer), boxed("1", "2")])
    assert (before.verdict, after.verdict) == (Verdict.RIGHT, Verdict.WRONG)
    assert hung.verdict != Verdict.RIGHT


def test_code_and_mathematics_in_one_call(verify: Verifier) -> None:
    """Each is judged in its own way, and the order is kept."""
    good = "```python\ndef add(a, b):\n    return a + b\n```"
    half = "```python\ndef add(a, b):\n    return 0\n```"
    submissions = [
        Submission(TESTS, good, AnswerPolicy.STATED),
        boxed("5", "5"),
        Submission(TESTS, half, AnswerPolicy.BOXED),
        boxed("5", "6"),
    ]
    grades = verify(submissions)
    assert [each.verdict for each in grades] == [Verdict.RIGHT, Verdict.RIGHT, Verdict.WRONG, Verdict.WRONG]
    assert [each.tests_passed for each in grades] == [1.0, None, 0.5, None]


def test_numbers_are_graded_by_the_thousand_in_a_second(verify: Verifier) -> None:
    """Two thousand answers to word problems take a second of processor time at most, at one of three attempts."""
    working = "3 + 4 = 7\n" * 5
    submissions = [Submission(str(n), f"{working}#### {n}", AnswerPolicy.MARKED) for n in range(2000)]
    verify(submissions)
    times = []
    for _ in range(3):
        before_s = _computed_s(verify)
        assert {each.verdict for each in verify(submissions)} == {Verdict.RIGHT}
        times.append(_computed_s(verify) - before_s)
    assert min(times) < 1


def _computed_s(verify: Verifier) -> float:
    """For how long this process and the workers have computed."""
    return time.process_time() + sum(worker.processor_s() for worker in verify._grade_mathematics._crew)


@pytest.mark.slow
def test_answers_of_math_come_back_at_once(verify: Verifier) -> None:
    """Of the reference solutions of MATH-500, asked one by one, less than one in a hundred computes for 100 ms."""
    if not MATH.is_file():
        pytest.skip(f"needs {MATH}, which is not part of the project")
    rows = [json.loads(line) for line in MATH.read_text(encoding="utf-8").splitlines()]
    times = []
    for row in rows:
        before_s = _computed_s(verify)
        assert verify([Submission(row["answer"], row["solution"], AnswerPolicy.BOXED)])[0].verdict == Verdict.RIGHT
        times.append(_computed_s(verify) - before_s)
    assert sorted(times)[-len(rows) // 100] < 0.1


def test_workers_are_started_when_needed_and_end_with_the_block() -> None:
    """A verifier that is asked nothing costs nothing; none is left behind, whatever ends the block."""
    threads = threading.active_count()
    before = _children()
    with pytest.raises(KeyError), Verifier() as verify:  # noqa: PT012
        assert _children() == before
        assert verify([]) == []
        assert _children() == before
        assert verify([boxed("1", "1")]) == [Grade(Verdict.RIGHT, "1", "same text")]
        assert verify([Submission(TESTS, "no code", AnswerPolicy.STATED)])[0].verdict == Verdict.WRONG
        assert _children() != before
        raise KeyError
    assert _children() == before
    assert threading.active_count() == threads


def test_the_cores_are_shared_among_the_processes_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many processes on this machine as it has cores, each starts one worker."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(os.cpu_count()))
    before = _children()
    with Verifier() as verify:
        verify([boxed("1", "1")] * 100)
        assert len(_children() - before) == 1


def _children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while the process is looked at
            found.update((task / "children").read_text(encoding="ascii").split())
    return found
