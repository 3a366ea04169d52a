"""Verdicts on classes of responses: members that nobody has seen before, made at random from a fixed seed."""

import random

import pytest

from components.grading.verifier import Submission, Verifier
from tests.grading.classes import CLASSES, Member

_NUM_MEMBERS = 60
_NUM_TRIES = 20 * _NUM_MEMBERS


def members(name: str, seed: int = 0) -> list[Member]:
    """Return different members of a class."""
    generator = random.Random(f"{name} {seed}")
    made = dict.fromkeys(CLASSES[name](generator) for _ in range(_NUM_TRIES))
    assert len(made) >= _NUM_MEMBERS, f"{name} has {len(made)} different members"
    return list(made)[:_NUM_MEMBERS]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_members_of_a_class_have_their_verdict(verify: Verifier, name: str) -> None:
    """All of them."""
    cases = members(name)
    grades = verify([Submission(case.gold, case.response, case.policy, case.question) for case in cases])
    failures = [(case, each) for case, each in zip(cases, grades, strict=True) if each.verdict != case.verdict]
    assert failures == []
