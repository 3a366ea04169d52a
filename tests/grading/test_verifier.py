"""The verifier as the stages use it, and its speed in processor time."""

import os
import subprocess
import sys
import threading

import pytest

from components.grading.verifier import Grade, Reason, Submission, Verdict, Verifier, grade
from components.shared.answer_policy import AnswerPolicy
from tests.grading.processes import children, processor_s, workers

TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0"
BOXED, MARKED, DECLARED, STATED, LAST_SENTENCE = AnswerPolicy
LONG = "5" * 301


def boxed(gold: str, answer: str) -> Submission:
    """A response that is an answer in a box."""
    return Submission(gold, rf"\boxed{{{answer}}}", BOXED)


@pytest.mark.parametrize(
    ("response", "policy", "expected"),
    [
        (r"\boxed{5}", BOXED, Grade(Verdict.RIGHT, "5", Reason.SAME_TEXT)),
        ("2+3\n#### 5", MARKED, Grade(Verdict.RIGHT, "5", Reason.SAME_TEXT)),
        ("The answer is 5.", STATED, Grade(Verdict.RIGHT, "5", Reason.SAME_TEXT)),
        (r"\boxed{5.0}", BOXED, Grade(Verdict.RIGHT, "5.0", Reason.SAME_NUMBER)),
        (r"\boxed{6}", BOXED, Grade(Verdict.WRONG, "6", Reason.OTHER_NUMBER)),
        (r"\boxed{\sqrt{25}}", BOXED, Grade(Verdict.RIGHT, r"\sqrt{25}", Reason.SAME_VALUE)),
        (r"\boxed{2+3}", BOXED, Grade(Verdict.WRONG, "2+3", Reason.SETUP)),
        (r"#### 5", BOXED, Grade(Verdict.WRONG, None, Reason.NO_ANSWER)),
        (f"#### {LONG}", MARKED, Grade(Verdict.WRONG, LONG, Reason.TOO_LONG, detail="more than 300 characters")),
    ],
)
def test_a_grade_says_what_was_compared_and_why(response: str, policy: AnswerPolicy, expected: Grade) -> None:
    """Verdict, answer and reason."""
    assert grade("5", response, policy) == expected


def test_the_verifier_and_the_grader_agree(verify: Verifier) -> None:
    """Workers return what the grader returns in this process, in order, by the policy of each; code among them."""
    texts = ["so\n#### 72", r"\boxed{72}", "The answer is 72.", r"\boxed{71}", r"\boxed{x+\frac12}", "\ud800", ""]
    golds = ("72", r"\frac12+x", "", r"\frac{")
    submissions = [Submission(gold, text, policy) for gold in golds for text in texts for policy in AnswerPolicy]
    half = "```python\ndef add(a, b):\n    return 0\n```"
    submissions.insert(3, Submission(TESTS, half, STATED))
    grades = verify(submissions)
    assert grades == [grade(each.gold, each.response, each.policy) for each in submissions]
    assert grades[3].tests_passed == 0.5


def test_workers_are_started_when_needed_and_end_with_the_block() -> None:
    """A verifier without submissions costs nothing; no worker is left behind, not even after an error."""
    threads, before = threading.active_count(), children()
    with pytest.raises(KeyError), Verifier() as verify:  # noqa: PT012
        assert verify([]) == []
        assert children() <= before  # those of other tests may end
        assert verify([boxed("1", "1")]) == [Grade(Verdict.RIGHT, "1", Reason.SAME_TEXT)]
        assert verify([Submission(TESTS, "no code", STATED)])[0].verdict == Verdict.WRONG
        assert children() - before
        raise KeyError
    assert children() <= before
    assert threading.active_count() == threads


def test_the_cores_are_shared_among_the_processes_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many processes on this machine as it has cores, each starts one worker."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(os.cpu_count()))
    before = workers()
    with Verifier() as verify:
        verify([boxed("1", "1")] * 100)
        assert len(workers() - before) == 1


def test_numbers_need_no_algebra() -> None:
    """Grading word problems imports neither math-verify nor sympy."""
    code = (
        "import sys; from components.grading.verifier import grade; from components.shared.answer_policy import "
        "AnswerPolicy as P; answers = ['72', '72.0', '$72', '72 apples', r'72\\%', 'x = 72', '71', '1/2', '7 or 2']; "
        "verdicts = [grade('72', f'#### {answer}', P.MARKED).verdict.value for answer in answers]; "
        "assert verdicts == ['right'] * 6 + ['wrong'] * 3, verdicts; "
        "assert not {'math_verify', 'sympy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_thousand_numbers_take_a_second_at_most() -> None:
    """Answers to word problems, never seen before: a tenth of that processor time in fact, by the best of two."""
    with Verifier(num_workers=1) as verify:
        times = []
        for start in (0, 1000, 2000):
            submissions = [
                Submission("19", f"3+5=8\n8+{n}={n + 8}\n#### {n}", MARKED) for n in range(start, start + 1000)
            ]
            before_s = processor_s()
            verify(submissions)
            times.append(processor_s() - before_s)
    assert min(times[1:]) < 1
