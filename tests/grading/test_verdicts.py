"""The verdicts on the cases of tests/grading/cases. To add a rule, add its lines to a table there."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from components.grading.extract import final_answer
from components.grading.verdicts import Reason
from components.grading.verifier import Submission, Verifier
from components.shared.answer_policy import AnswerPolicy
from tests.grading.classes import CLASSES
from tests.grading.tables import ATTACKS, Case, rows, table

BOXED, MARKED, DECLARED, STATED, LAST_SENTENCE = AnswerPolicy
NOT_CORE = ("contested:", "policy:", "not-math:", "language:", "upstream-label-wrong", "source-escape-bug")


def boxed(gold: str, answer: str) -> Submission:
    """A response that is an answer in a box."""
    return Submission(gold, rf"\boxed{{{answer}}}", STATED)


def failures(verify: Verifier, cases: Sequence[tuple[Submission, str]]) -> list[Any]:
    """The submissions that get another verdict than the one beside them, with their grades; or none in time."""
    grades = verify([submission for submission, _ in cases])
    return [(*case, each) for case, each in zip(cases, grades, strict=True) if each.verdict != case[1]]


@pytest.mark.parametrize("verdict", ["right", "wrong"])
def test_two_answers_have_their_verdict_whichever_is_expected(verify: Verifier, verdict: str) -> None:
    """Other notations of an answer are right, near misses wrong; only an expected text may be unreadable."""
    pairs = [(gold, answer) for gold, answer, expected, _ in table("answers.tsv") if expected == verdict]
    submissions = [boxed(*pair) for gold, answer in pairs for pair in ((gold, answer), (answer, gold))]
    failed = failures(verify, [(submission, verdict) for submission in submissions])
    assert [each for each in failed if verdict == "right" or each[-1].reason is not Reason.UNREADABLE_GOLD] == []


def test_every_answer_equals_itself(verify: Verifier) -> None:
    """The expected text is right, with spaces around it too, unless it is undefined."""
    texts = {text for gold, answer, _, why in table("answers.tsv") if why != "undefined" for text in (gold, answer)}
    assert failures(verify, [(boxed(text, f" {text} "), "right") for text in sorted(texts)]) == []


def test_a_question_decides_what_repeats_it_and_what_is_a_unit(verify: Verifier) -> None:
    """Whoever only copies the question is wrong; a letter that is no unit there stays a variable."""
    gallons = "A tank holds 100 gallons and loses 2 each hour. How many gallons are left after h hours?"
    cases = [
        (r"Express $0.1\overline{6}$ as a common fraction.", r"\frac16", r"0.1\overline{6}", "wrong"),
        ("Write 2:3 as a fraction.", r"\frac23", "2:3", "wrong"),
        (gallons, "100-2h", "98", "wrong"),
        (gallons, "100-2h", "-2h+100", "right"),
    ]
    graded = [
        (Submission(gold, rf"\boxed{{{answer}}}", STATED, asked), verdict) for asked, gold, answer, verdict in cases
    ]
    assert failures(verify, graded) == []


@pytest.mark.parametrize("name", ["responses.tsv", "gsm8k.tsv"])
def test_a_response_has_the_verdict_of_its_final_answer(verify: Verifier, name: str) -> None:
    """Hand-written responses, and solutions of GSM8K as they are and with mistakes."""
    cases = [Case(*row) for row in table(name)]
    assert failures(verify, [(Submission(case.gold, case.response, STATED), case.verdict) for case in cases]) == []


def test_an_attack_is_wrong_by_every_policy(verify: Verifier) -> None:
    """Not unscorable either, which would spare a policy its penalty."""
    cases = list(ATTACKS)
    for length in (300, 3000):
        digits = "7" * length
        answers = [(digits, f"{digits[:-1]}8"), (digits, digits[:-1]), ("5", f"5{' ' * length}6")]
        answers.append(("5", f"5.{'0' * length}1"))
        cases += [Case(gold, rf"\boxed{{{answer}}}", "wrong", "almost equal, and long") for gold, answer in answers]
    submissions = {
        (case.gold, final_answer(case.response, policy)): Submission(case.gold, case.response, policy)
        for case in cases
        for policy in AnswerPolicy
    }
    assert len(submissions) > 1000
    assert failures(verify, [(submission, "wrong") for submission in submissions.values()]) == []


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_members_of_a_class_have_their_verdict(verify: Verifier, name: str) -> None:
    """Members that nobody has seen before, made at random from a fixed seed."""
    rng = random.Random(f"{name} 0")
    members = list(dict.fromkeys(CLASSES[name](rng) for _ in range(1200)))[:60]
    assert len(members) == 60
    cases = [(Submission(each.gold, each.response, each.policy, each.question), each.verdict) for each in members]
    assert failures(verify, cases) == []


@pytest.mark.parametrize("name", ["gsm8k_train", "gsm8k_test"])
def test_every_solution_of_gsm8k_is_right(verify: Verifier, name: str) -> None:
    """The grader accepts the reference solutions."""
    answers = [row["answer"] for row in rows(f"data/{name}.jsonl")]
    golds = [answer.rpartition("####")[2].strip().replace(",", "") for answer in answers]
    submissions = [
        Submission(gold, answer, policy)
        for gold, answer in zip(golds, answers, strict=True)
        for policy in (MARKED, STATED)
    ]
    assert failures(verify, [(submission, "right") for submission in submissions]) == []


def test_every_solution_of_math500_is_right(verify: Verifier) -> None:
    """The grader accepts the reference solutions, and the answers alone, in a box, in a formula and in a sentence."""
    submissions = []
    for row in rows("data/math500.jsonl"):
        answer, question = row["answer"], row["problem"]
        bare = (rf"\boxed{{{answer}}}", answer, f"${answer}$", f"The answer is ${answer}$.")
        for response in (row["solution"], *bare):
            submissions += [Submission(answer, response, STATED, asked) for asked in ("", question)]
        submissions.append(Submission(row["solution"], bare[0], BOXED))
    assert failures(verify, [(submission, "right") for submission in submissions]) == []


@pytest.mark.slow
def test_agreement_on_pairs_of_answers(verify: Verifier) -> None:
    """All undisputed cases have the verdict of their label, but for a sum that is called equal to its value."""
    cases = [
        case for case in rows("grading/dev_cases.jsonl") if not any(tag.startswith(NOT_CORE) for tag in case["tags"])
    ]
    grades = verify([Submission(case["gold"], case["prediction"], STATED) for case in cases])
    assert len(cases) == 230
    verdicts = zip(cases, grades, strict=True)
    failed = [case["prediction"] for case, each in verdicts if (each.verdict == "right") != case["expected_equal"]]
    assert failed == [r"Answer \( (9+1) \)"]


@pytest.mark.slow
def test_agreement_on_model_outputs(verify: Verifier) -> None:
    """On real answers to GSM8K and MATH-500 the verdict is the label in 199 of 200, and always there in time."""
    outputs = rows("grading/dev_outputs.jsonl")
    grades = verify([Submission(row["gold"], row["response"], STATED) for row in outputs])
    assert Reason.TIME not in {each.reason for each in grades}
    disagreements = [
        row for row, each in zip(outputs, grades, strict=True) if (each.verdict == "right") != row["is_correct"]
    ]
    assert len(disagreements) <= 6
    false_positives = {row["gold"] for row in disagreements if not row["is_correct"]}
    # Labelled wrong, though one has the expected time, one the expected angle in radians, and one ends in an equation
    # whose last side is the expected angle.
    assert false_positives <= {r"\text{4:30 p.m.}", r"30^\circ", r"-\frac{\pi}{6}"}


def test_every_reason_is_documented() -> None:
    """With its rule, in the order of the list."""
    page = Path("docs/reference/grading.md").read_text(encoding="utf-8")
    assert "\n".join(f"| {reason.value} | {reason.rule} |" for reason in Reason) in page
