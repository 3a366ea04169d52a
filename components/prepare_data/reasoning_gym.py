"""Tasks of the package reasoning_gym: generated problems of many kinds, whose answers our grader decides.

The package's own scorers are not used, because they give wrong answers part of the reward. So only tasks are accepted
whose questions differ in words or numbers and have one right answer in one line. Tasks that ask for an order or a
notation are left out: the grader accepts lists in any order, and fractions that are not reduced.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from components.prepare_data.source import BuiltIn
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split

_NAMES = (
    "acre aiw basic_arithmetic bf binary_alternation caesar_cipher calendar_arithmetic chain_sum circuit_logic "
    "color_cube_rotation complex_arithmetic count_bits count_primes course_schedule decimal_chain_sum "
    "family_relationships game_of_life_halting gcd gsm_symbolic isomorphic_strings largest_island lcm leg_counting "
    "letter_counting mahjong_puzzle maze needle_haystack number_format number_sequence products ransom_note "
    "rotten_oranges self_reference simple_equations simple_geometry spell_backward string_insertion "
    "string_manipulation syllogism time_intervals zebra_puzzles"
)
TASKS = _NAMES.split()
_NUM_SPARE = 1_000
"""Entries of each task beyond four times the number needed: questions recur."""


class ReasoningGym(BuiltIn):
    """Problems that the package reasoning_gym generates: nothing to download, but the package has to be installed."""

    kind: Literal["reasoning_gym"]
    tasks: dict[str, dict[str, Any]] = Field(min_length=1)
    """Tasks of the package by name, each with arguments of its dataset, such as `chain_sum: {min_terms: 2}`, or `{}`
    for its defaults. They have equal shares; each becomes a subject of the scores."""
    num_train: int = Field(8000, ge=0)
    """Problems of the train split."""
    num_test: int = Field(600, ge=0)
    """Problems of the test split; none of their questions occurs in another split."""
    num_dev: int = Field(0, ge=0)
    """Problems of the dev split; none of their questions occurs in another split."""

    @field_validator("tasks")
    @classmethod
    def _tasks_exist(cls, tasks: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if unknown := sorted(tasks.keys() - TASKS):
            raise ValueError(f"no such task: {unknown[0]}; accepted: {', '.join(TASKS)}")
        return tasks

    def problems(self, seed: int) -> Iterator[Problem]:
        """Yield the test split first, so that the sizes of the others do not change it; tasks take turns in each."""
        size = _NUM_SPARE + 4 * (self.num_train + self.num_test + self.num_dev) // len(self.tasks)
        entries = {
            task: _entries(task, {**arguments, "seed": seed, "size": size}) for task, arguments in self.tasks.items()
        }
        for split in (Split.TEST, Split.DEV, Split.TRAIN):
            for index in range(self.max_problems(split)):
                task = list(self.tasks)[index % len(self.tasks)]
                entry = next(entries[task], None)
                if entry is None:
                    raise PipelineError(
                        f"prepare_data.sources: reasoning_gym: num_{split} is {self.max_problems(split)}, but {task} "
                        f"has no further question after {index} problems; lower it, or give {task} other arguments"
                    )
                question, answer = entry
                yield self._problem(split, index, answer, question=question, subject=task, level=None)


def _entries(task: str, arguments: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the different questions of a task with their answers."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise PipelineError(
            f"prepare_data.sources: reasoning_gym: the package cannot be imported ({error}); install it into the "
            "environment that runs prepare_data: `pip install reasoning-gym`"
        ) from None
    try:
        dataset = reasoning_gym.create_dataset(task, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise PipelineError(f"prepare_data.sources: reasoning_gym: tasks.{task}: {error}") from None
    seen = set()
    for index in range(arguments["size"]):
        entry = dataset[index]
        question = entry["question"].strip()
        if question not in seen:
            seen.add(question)
            yield question, entry["answer"].strip()
