"""Built-in one-step word problems with distractors, to teach a pretrained model the form of an answer."""

import random
from collections.abc import Callable, Iterator
from typing import Literal

from pydantic import Field

from components.prepare_data.source import MAX_DRAWS, BuiltIn
from components.shared.problem import Problem, Split

_PEOPLE = "Ada Bob Cora Dan Elif Finn Gina Hugo Iris Jack Kim Liam Mona Nils Olga Paul Rosa Sven Tara Umar Vera Yuki"
_NAMES = _PEOPLE.split()
_COUNTED = (
    "apples pears books pens cards coins shells stones stamps cups plates balls toys kites eggs nuts lemons plums "
    "cookies cakes flowers tickets bottles boxes buttons beads marbles stickers photos birds"
)
_THINGS = _COUNTED.split()
_PLACES = ("the market", "the park", "school", "home", "the shop", "the farm", "the fair", "the garden", "the beach")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_LIMITS = (10, 20, 50, 100)
"""Limits of the numbers in a problem, each used equally often."""
_TEXTS = {
    "addition": """
{a} had {x} {t}. {b} gave {a} {y} more {t} and {z} {u}. How many {t} does {a} have now?
{a} has {x} {t} and {z} {u}. {b} has {y} {t}. How many {t} do they have together?
{a} has {y} more {t} than {b}. {b} has {x} {t}. How many {t} does {a} have?
{a} found {x} {t} on {d} and {y} {t} on {e}. How many {t} did {a} find in all?
{a} had some {t}. {a} lost {x} of them at {p} and now has {y} {t} left. How many {t} did {a} have in the beginning?
There are {x} red {t}, {y} blue {t} and {z} {u} at {p}. How many {t} are there?
{a} made {x} {t} and bought {z} {u}. {b} made {y} {t} more than {a}. How many {t} did {b} make?
""",
    "subtraction": """
{a} had {x} {t}. {a} gave {y} of them to {b}. {b} already had {z} {t}. How many {t} does {a} have left?
{a} has {x} {t} and {b} has {y} {t}. There are {z} {u} at {p}. How many more {t} than {b} does {a} have?
{a} has {y} fewer {t} than {b}. {b} has {x} {t} and {z} {u}. How many {t} does {a} have?
{a} found {x} {t} on {d}, {y} {t} on {e} and {z} {u}. How many more {t} did {a} find on {d} than on {e}?
{a} had some {t}. After buying {y} more at {p}, {a} has {x} {t}. How many {t} did {a} have at first?
{a} had {x} {t}. {a} sold some of them and has {y} left. How many {t} did {a} sell?
There were {x} {t} at {p}. {a} took {y} {t} and {b} took {z} {u}. How many {t} are left at {p}?
{a} wants to collect {x} {t}. So far {a} has {y} {t} and {z} {u}. How many more {t} does {a} need?
There are {x} people in the hall. {y} of them are children and the rest are adults. How many adults are there?
{a} had {x} dollars and spent {y} dollars on {t}. {b} spent {z} dollars. How many dollars does {a} have left?
""",
    "multiplication": """
There are {x} {t} in each box. {a} has {y} boxes and {z} {u}. How many {t} does {a} have in all?
{a} paid {y} dollars for each of {x} {t}, and spent {z} dollars on {u}. How much did {a} pay for the {t}?
{a} sold {x} {t} a day for {y} days. {b} sold {z} {u}. How many {t} did {a} sell?
""",
    "division": """
{a} puts {x} {t} into {y} bags. Each bag gets the same number of {t}. {a} also has {z} {u}. \
How many {t} are in each bag?
{a} packs {x} {t} so that each box holds {y}. {b} has {z} {t}. How many boxes does {a} need?
{a} paid {x} dollars for {y} {t}. {b} paid {z} dollars for {u}. How much did each of the {t} cost?
{a} reads {y} pages every day. The book has {x} pages and {z} pictures. How many days does {a} need to finish it?
""",
}
"""Stories with their questions by subject, one per line. The fields are: x, y numbers to compute with; z a number that
does not matter; a, b names; t, u things; d, e days; p a place."""
_STORIES = [(subject, story) for subject, texts in _TEXTS.items() for story in texts.strip().splitlines()]
_OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "addition": ("+", int.__add__),
    "subtraction": ("-", int.__sub__),
    "multiplication": ("*", int.__mul__),
    "division": ("/", int.__floordiv__),
}


class OneStepProblems(BuiltIn):
    """Built-in one-step word problems, generated in any number: nothing to download."""

    kind: Literal["one_step_problems"]
    num_train: int = Field(4000, gt=0)
    """Problems of the train split, the only one: the effect of training on them is measured on real problems."""

    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield different problems whose stories take turns; a solution is a worked line and the answer."""
        rng = random.Random(f"{seed} {self.kind}")
        seen: set[str] = set()
        for index in range(self.num_train):
            subject, story = _STORIES[index % len(_STORIES)]
            draws = (_draw(rng, subject, story) for _ in range(MAX_DRAWS))
            question, first, second = self._first((each for each in draws if each[0] not in seen), Split.TRAIN, index)
            seen.add(question)
            sign, compute = _OPERATIONS[subject]
            answer = compute(first, second)
            work = f"{first} {sign} {second} = {answer}\n"
            yield self._problem(Split.TRAIN, index, answer, work, question=question, subject=subject, level=None)


def _draw(rng: random.Random, subject: str, story: str) -> tuple[str, int, int]:
    """Return a question from a story, and the two numbers to compute with."""
    first, second = _numbers(rng, subject)
    a, b = rng.sample(_NAMES, 2)
    t, u = rng.sample(_THINGS, 2)
    d, e = rng.sample(_DAYS, 2)
    z = rng.randint(2, rng.choice(_LIMITS))
    return story.format(a=a, b=b, t=t, u=u, d=d, e=e, p=rng.choice(_PLACES), x=first, y=second, z=z), first, second


def _numbers(rng: random.Random, subject: str) -> tuple[int, int]:
    """Return the two numbers to compute with: both at least 2, with a positive difference or a whole quotient."""
    limit = rng.choice(_LIMITS)
    first, second = rng.randint(2, limit), rng.randint(2, limit)
    if subject in ("multiplication", "division"):
        first, second = rng.randint(2, 12 if limit < 50 else 30), rng.randint(2, 12)
        return (first, second) if subject == "multiplication" else (first * second, second)
    if subject == "subtraction" and first <= second:
        first, second = second + rng.randint(1, 9), first
    return first, second
