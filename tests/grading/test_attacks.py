"""The grader against responses that try to be graded right without the answer."""

import pytest

from components.grading.answer import final_answer
from components.grading.verifier import Submission, Verdict, Verifier
from components.shared.answer_policy import AnswerPolicy
from tests.grading.attacks import ATTACKS


@pytest.mark.slow
def test_a_response_without_the_answer_is_wrong() -> None:
    """Wherever the answer is looked for, an attack is wrong; unscorable would save a policy from what it deserves."""
    submissions = {
        (attack.gold, final_answer(attack.response, policy)): Submission(attack.gold, attack.response, policy)
        for attack in ATTACKS
        for policy in AnswerPolicy
    }
    with Verifier() as verify:
        grades = verify(list(submissions.values()))
    judged = zip(submissions.values(), grades, strict=True)
    assert [pair for pair in judged if pair[1].verdict is not Verdict.WRONG] == []


def test_attacks_are_many_and_none_is_there_twice() -> None:
    """Each attack is an attempt of its own."""
    assert len({(attack.gold, attack.response) for attack in ATTACKS}) == len(ATTACKS) > 1000
