"""A search for hacks: right answers are mutated by the thousand into texts that have to be wrong."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from components.grading.verifier import Submission, Verdict, Verifier
from tests.grading.hacks.notation import kept
from tests.grading.hacks.phrases import PHRASES, echo, phrased
from tests.grading.hacks.rights import Mutant, Right, any_right, known_rights

_SEED = 0
_NUM_MUTANTS = 1400
"""Of each mutator."""
_NUM_KEPT = 6000
_MAX_TRIES = 60
_KNOWN = 0.35
"""Share of the right answers that are taken from tables and data sets, not made."""

Mutator = Callable[[random.Random, Right], Mutant | None]
MUTATORS: dict[str, Mutator] = {**{name: partial(phrased, name) for name in PHRASES}, "echo": echo}


def _any_right(generator: random.Random) -> Right:
    return generator.choice(known_rights()) if generator.random() < _KNOWN else any_right(generator)


def mutants(mutator: str, seed: int = _SEED, number: int = _NUM_MUTANTS) -> list[Mutant]:
    """Return different mutants of one mutator."""
    generator = random.Random(f"{mutator} {seed}")
    made: dict[Mutant, None] = {}
    for _ in range(number * _MAX_TRIES):
        if len(made) == number:
            break
        if mutant := MUTATORS[mutator](generator, _any_right(generator)):
            made[mutant] = None
    return list(made)


def graded(verify: Verifier, cases: Iterable[Mutant]) -> dict[Verdict, dict[str, list[Mutant]]]:
    """Return mutants by their verdict and mutator."""
    cases = list(cases)
    grades = verify([Submission(case.gold, case.response, case.policy, case.question) for case in cases])
    groups: dict[Verdict, dict[str, list[Mutant]]] = {verdict: defaultdict(list) for verdict in Verdict}
    for case, grade in zip(cases, grades, strict=True):
        groups[grade.verdict][case.mutator].append(case)
    return groups


@pytest.mark.long(minutes=4)
def test_fewer_than_one_mutant_in_a_thousand_is_right(verify: Verifier) -> None:
    """In all, and at most one in a hundred by each mutator."""
    cases = [mutant for mutator in MUTATORS for mutant in mutants(mutator)]
    assert len(cases) >= 20_000
    made = Counter(case.mutator for case in cases)
    accepted = graded(verify, cases)[Verdict.RIGHT]
    for mutator, found in sorted(accepted.items()):
        print(f"{mutator}: {len(found)} of {made[mutator]} accepted", *found, sep="\n    ")
    assert sum(map(len, accepted.values())) * 1000 < len(cases)
    assert [mutator for mutator, found in accepted.items() if len(found) * 100 > made[mutator]] == []


@pytest.mark.long(minutes=1)
def test_another_notation_of_a_right_answer_stays_right(verify: Verifier) -> None:
    """Of 1,000 at least 999; only golds that are right as they are written count."""
    generator = random.Random(_SEED)
    rights = dict.fromkeys(_any_right(generator) for _ in range(_NUM_KEPT))
    plain = graded(
        verify, (Mutant(right.gold, right.gold, rf"\boxed{{{right.gold}}}", right.question) for right in rights)
    )
    readable = [right for right in rights if right.gold in plain[Verdict.RIGHT]]
    assert len(readable) >= 0.99 * len(rights)
    cases = list(dict.fromkeys(kept(generator, right) for right in readable))
    groups = graded(verify, cases)
    refused = [
        case for verdict in (Verdict.WRONG, Verdict.UNSCORABLE) for found in groups[verdict].values() for case in found
    ]
    print(f"{len(refused)} of {len(cases)} refused", *refused, sep="\n    ")
    assert len(refused) * 1000 <= len(cases)


@pytest.mark.parametrize("mutator", sorted(MUTATORS))
def test_every_mutator_makes_mutants(mutator: str) -> None:
    """Different ones, the same at every run, and none of them the gold."""
    made = mutants(mutator, number=20)
    assert len(made) >= 15
    assert made == mutants(mutator, number=20)
    assert [case for case in made if case.response == rf"\boxed{{{case.gold}}}"] == []
