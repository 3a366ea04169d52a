"""Words that have to be in a text before a pattern is searched for in it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.grading import objections
from components.grading.objections import _Rule
from components.grading.reasons import Reason

RULES = {name: rule for name, rule in vars(objections).items() if isinstance(rule, _Rule)}


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule_applies_to_every_text_that_its_pattern_matches(name: str) -> None:
    """No text that a pattern matches lacks the words of the rule."""

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(st.from_regex(RULES[name].pattern))
    def applies(text: str) -> None:
        assert RULES[name].applies(objections._words_of(text), text), text

    applies()


@pytest.mark.parametrize(
    "text", [". Sorry.", ". \u017forry.", ". \u0130 misread it.", ". I m\u0131sread it.", ". \u212aidding."]
)
def test_rules_know_letters_that_are_equal_without_their_case(text: str) -> None:
    """Patterns take a dotless i for an i, a long s for an s, and the sign of a kelvin for a k."""
    assert objections.taken_back(text) == Reason.TAKEN_BACK
