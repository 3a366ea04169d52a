"""A search for hacks: right answers are mutated by the thousand into texts that have to be wrong."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from components.grading.verifier import Submission, Verdict, Verifier
from tests.grading.hacks import PHRASES, Mutant, Right, any_right, echo, known_rights, phrased

_SEED = 0
_NUM_MUTANTS = 1400
"""Of each mutator."""
_MAX_TRIES = 60
_KNOWN = 0.35
"""Share of the right answers that are taken from tables and data sets, not made."""

Mutator = Callable[[random.Random, Right], Mutant | None]
MUTATORS: dict[str, Mutator] = {**{name: partial(phrased, name) for name in PHRASES}, "echo": echo}


def mutants(mutator: str) -> list[Mutant]:
    """Return different mutants of one mutator."""
    generator = random.Random(f"{mutator} {_SEED}")
    made: dict[Mutant, None] = {}
    for _ in range(_NUM_MUTANTS * _MAX_TRIES):
        right = generator.choice(known_rights()) if generator.random() < _KNOWN else any_right(generator)
        if mutant := MUTATORS[mutator](generator, right):
            made[mutant] = None
        if len(made) == _NUM_MUTANTS:
            break
    return list(made)


@pytest.mark.long(minutes=4)
def test_fewer_than_one_mutant_in_a_thousand_is_right(verify: Verifier) -> None:
    """In all, and at most one in a hundred by each mutator."""
    cases = [mutant for mutator in MUTATORS for mutant in mutants(mutator)]
    assert len(cases) >= 20_000
    grades = verify([Submission(case.gold, case.response, case.policy, case.question) for case in cases])
    accepted = [case for case, each in zip(cases, grades, strict=True) if each.verdict is Verdict.RIGHT]
    print(*accepted, sep="\n")
    assert len(accepted) * 1000 < len(cases)
    made, found = (Counter(case.mutator for case in some) for some in (cases, accepted))
    assert [mutator for mutator in found if found[mutator] * 100 > made[mutator]] == []
