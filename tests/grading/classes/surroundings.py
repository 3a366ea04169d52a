r"""What is around the box or the statement of an answer: responses by the templates of surroundings.tsv."""

import random
import re
from collections import defaultdict
from functools import partial

from components.shared.answer_policy import AnswerPolicy
from tests.grading.classes.member import Generator, Member
from tests.grading.classes.numbers import in_words
from tests.grading.tables import table

_PARTS: dict[str, list[str]] = defaultdict(list)
_MEMBERS: dict[str, list[tuple[str, str, str, str]]] = defaultdict(list)
for _name, _verdict, _policies, _gold, _template in table("surroundings.tsv"):
    if _verdict:
        _MEMBERS[_name].append((_verdict, _policies, _gold, _template))
    else:
        _PARTS[_name].append(_template)


def _numbers(rng: random.Random, template: str) -> dict[str, str]:
    """The numbers of a response, in digits and in words."""
    a, b = rng.sample(range(2, 500), 2)
    n, o = a + b, rng.randint(1001, 1999)
    box = n if "####" in template else rng.choice([rf"$\boxed{{{n}}}$", rf"\boxed{{{n}}}"])
    forms = [n, n, n, f"{n}.{a % 9 + 1}", rf"\frac{{{n}}}{{{n + 1}}}", rf"{a}\sqrt{{{rng.choice([2, 3, 5, 7])}}}"]
    numbers = {"a": a, "b": b, "n": n, "o": o, "n2": 2 * n + 1, "v": box, "g": rng.choice(forms)}
    return {name: str(value) for name, value in numbers.items()} | {
        "words": re.sub("^a ", "one ", in_words(rng, n)),
        "owords": re.sub("^a ", "one ", in_words(rng, o)),
    }


def _filled(rng: random.Random, template: str, numbers: dict[str, str]) -> str:
    def part(match: re.Match[str]) -> str:
        name = match[1]
        if name in numbers:
            return numbers[name]
        return _filled(rng, rng.choice(_PARTS[name]), numbers) if name in _PARTS else match[0]

    return re.sub("<([a-z0-9]+)>", part, template)


def _member(name: str, rng: random.Random) -> Member:
    verdict, policies, gold, template = rng.choice(_MEMBERS[name])
    numbers = _numbers(rng, template)
    response = _filled(rng, template, numbers)
    policy = AnswerPolicy(rng.choice(policies.split()))
    return Member(_filled(rng, gold, numbers), response, verdict, policy=policy)


CLASSES: dict[str, Generator] = {name: partial(_member, name) for name in _MEMBERS}
