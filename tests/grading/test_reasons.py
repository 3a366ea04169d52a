"""Reasons: a closed list, which the code and its documentation agree on."""

import pickle
from pathlib import Path

from components.grading.verdicts import Reason
from components.grading.verifier import Grade, Verdict


def test_a_reason_is_its_phrase() -> None:
    """In records, and after a transport between processes."""
    for reason in Reason:
        assert str(reason) == reason.value == f"{reason}"
        assert Reason(reason.value) is reason
        assert pickle.loads(pickle.dumps(reason)) is reason
        assert reason.rule.endswith(".")
        assert len(reason.value) < 70


def test_the_detail_of_a_grade_stands_behind_its_reason() -> None:
    """Where there is one."""
    assert Grade(Verdict.WRONG, "5", Reason.UNIT, detail="length where money is expected").why == (
        "unit (length where money is expected)"
    )
    assert Grade(Verdict.RIGHT, "5", Reason.SAME_TEXT).why == "same text"


def test_every_reason_is_documented() -> None:
    """With its rule, in the order of the list."""
    page = Path("docs/reference/grading.md").read_text(encoding="utf-8")
    assert "\n".join(f"| {reason.value} | {reason.rule} |" for reason in Reason) in page
