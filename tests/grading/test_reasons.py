"""Reasons: a closed list, which the code and its documentation agree on."""

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.grading.text_rules import _ONLY_IF_EXPECTED
from components.grading.verdicts import Reason
from components.grading.verifier import Grade, Verdict

_SOURCES = sorted(Path("components/grading").glob("*.py"))
_ONE_PHRASE = {"Decision": 1, "RejectedAnswerError": 0, "UnreadableGoldError": 0}
_TWO_PHRASES = {"on", "_by_algebra"}


def _phrases(path: Path) -> Iterator[str]:
    """The constants that a module gives as reasons."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        place = _ONE_PHRASE.get(name, 0 if name in _TWO_PHRASES else None)
        if place is None or len(node.args) <= place:
            continue
        for constant in ast.walk(node.args[place]):
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                prefixes = ("same ", "different ") if name in _TWO_PHRASES else ("",)
                yield from (prefix + constant.value for prefix in prefixes)


@pytest.mark.parametrize("path", _SOURCES, ids=lambda path: path.name)
def test_every_reason_in_the_code_is_in_the_list(path: Path) -> None:
    """A new rule gets a name of its own there."""
    assert [phrase for phrase in _phrases(path) if Reason.of(phrase) is Reason.OTHER] == []


def test_rejections_by_pattern_are_in_the_list() -> None:
    """They are in a table."""
    assert Reason.OTHER not in [Reason.of(phrase) for _, phrase in _ONLY_IF_EXPECTED]


def test_a_reason_is_its_phrase() -> None:
    """In records, and after a transport between processes."""
    for reason in Reason:
        assert str(reason) == reason.value == f"{reason}"
        assert Reason.of(reason.value) is reason
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
