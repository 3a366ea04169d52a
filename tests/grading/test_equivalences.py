"""The grader against answers whose verdict a mathematician knows."""

import random
from collections.abc import Iterator, Sequence
from itertools import chain

import pytest

from components.grading.verifier import Grade, Submission, Verdict, Verifier
from components.shared.answer_policy import AnswerPolicy
from tests.grading.equivalences import DIFFERENT, RIGHT, SAME, WRONG

BARE = sorted(set(chain.from_iterable(chain.from_iterable([*SAME.values(), *DIFFERENT.values()]))))


@pytest.fixture(scope="module")
def verify() -> Iterator[Verifier]:
    """A verifier for all tests of this module."""
    with Verifier() as verifier:
        yield verifier


def _in_a_box(gold: str, answer: str) -> Submission:
    return Submission(gold, rf"\boxed{{{answer}}}", AnswerPolicy.STATED)


def _others(verify: Verifier, submissions: Sequence[Submission], verdict: Verdict) -> list[tuple[Submission, Grade]]:
    """The submissions whose verdict is another one."""
    judged = zip(submissions, verify(submissions), strict=True)
    return [(submission, grade) for submission, grade in judged if grade.verdict is not verdict]


@pytest.mark.slow
@pytest.mark.parametrize("topic", SAME)
def test_another_way_to_write_the_answer_is_right(topic: str, verify: Verifier) -> None:
    """Two ways to write one answer are equal, whichever of the two is expected."""
    submissions = [_in_a_box(*pair) for one, other in SAME[topic] for pair in ((one, other), (other, one))]
    assert _others(verify, submissions, Verdict.RIGHT) == []


@pytest.mark.slow
@pytest.mark.parametrize("topic", DIFFERENT)
def test_a_near_miss_is_wrong(topic: str, verify: Verifier) -> None:
    """Two answers that only look alike are not equal, whichever of the two is expected."""
    submissions = [_in_a_box(*pair) for one, other in DIFFERENT[topic] for pair in ((one, other), (other, one))]
    assert _others(verify, submissions, Verdict.WRONG) == []


@pytest.mark.slow
@pytest.mark.parametrize(("verdict", "responses"), [(Verdict.RIGHT, RIGHT), (Verdict.WRONG, WRONG)])
def test_a_response_has_the_verdict_of_its_final_answer(
    verdict: Verdict, responses: list[tuple[str, str]], verify: Verifier
) -> None:
    """Whole responses are judged by the answer that they give, in whatever way they give it."""
    submissions = [Submission(gold, response, AnswerPolicy.STATED) for gold, response in responses]
    assert _others(verify, submissions, verdict) == []


@pytest.mark.slow
def test_every_answer_equals_itself(verify: Verifier) -> None:
    """What is written as expected is right, also where spaces are written between its parts."""
    assert _others(verify, [_in_a_box(answer, f" {answer} ") for answer in BARE], Verdict.RIGHT) == []


@pytest.mark.slow
def test_it_does_not_matter_which_of_two_answers_is_expected(verify: Verifier) -> None:
    """The verdict on any two answers is the same both ways, and there is one."""
    generator = random.Random(0)
    pairs = [generator.sample(BARE, 2) for _ in range(100)]
    there = verify([_in_a_box(one, other) for one, other in pairs])
    back = verify([_in_a_box(other, one) for one, other in pairs])
    judged = zip(pairs, there, back, strict=True)
    assert [all_ for all_ in judged if all_[1].verdict is not all_[2].verdict] == []
    assert Verdict.UNSCORABLE not in {grade.verdict for grade in [*there, *back]}
