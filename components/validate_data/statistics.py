"""What the problems are like, in numbers: for the page and for whoever reads result.json."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from components.shared.problem import Problem, Split
from components.validate_data.rows import Row

_NUM_BINS = 30
_NUM_ANSWERS = 6


def describe(frame: pd.DataFrame, rows: Sequence[Row]) -> dict[str, Any]:
    """Return counts by source, subject and level, lengths, the commonest answers, and one problem of each source."""
    problems = [row.problem for row in rows if row.problem]
    worked = frame["worked"].dropna()
    return {
        "sources": _counts(problems, ((problem.source, None) for problem in problems)),
        "subjects": _counts(problems, ((problem.source, problem.subject or None) for problem in problems), named=True),
        "levels": _counts(problems, ((problem.source, problem.level) for problem in problems), named=True),
        "prompt_tokens": _lengths(frame["prompt_tokens"]),
        "solution_tokens": _lengths(frame["solution_tokens"]),
        "answers": {str(split): _answers(problems, split) for split in Split},
        "worked_fraction": float(worked.mean()) if len(worked) else None,
        "examples": _examples(problems),
    }


def _counts(
    problems: Sequence[Problem], groups: Iterable[tuple[str, str | int | None]], *, named: bool = False
) -> list[dict[str, Any]]:
    """Rows of each split by source and group, in order; with `named`, only where the group has a name."""
    counted = Counter(
        (group, problem.split)
        for problem, group in zip(problems, groups, strict=True)
        if group[1] is not None or not named
    )
    return [
        {"source": source, "group": name, **{str(split): counted[(source, name), split] for split in Split}}
        for source, name in sorted({group for group, _ in counted}, key=lambda group: (group[0], group[1] or ""))
    ]


def _lengths(column: pd.Series) -> dict[str, Any] | None:
    """Quantiles and a histogram of token counts; None where there is no text."""
    tokens = sorted(int(value) for value in column.dropna())
    if not tokens:
        return None
    width = max(1, -(-(tokens[-1] - tokens[0] + 1) // _NUM_BINS))
    bins = Counter((value - tokens[0]) // width for value in tokens)
    return {
        "texts": len(tokens),
        **{name: tokens[round(rank * (len(tokens) - 1))] for name, rank in _RANKS.items()},
        "histogram": {"start": tokens[0], "width": width, "counts": [bins[index] for index in range(max(bins) + 1)]},
    }


_RANKS = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}


def _answers(problems: Sequence[Problem], split: Split) -> dict[str, Any]:
    answers = Counter(problem.answer for problem in problems if problem.split == split)
    ranked = sorted(answers.items(), key=lambda item: (-item[1], item[0]))[:_NUM_ANSWERS]
    return {
        "distinct": len(answers),
        "commonest": [
            {"answer": answer, "rows": number, "fraction": number / answers.total()} for answer, number in ranked
        ],
    }


def _examples(problems: Sequence[Problem]) -> list[dict[str, str]]:
    """The first problem of each source, of the train split where it has one."""
    first: dict[str, Problem] = {}
    for problem in sorted(problems, key=lambda problem: problem.split != Split.TRAIN):
        first.setdefault(problem.source, problem)
    return [
        problem.model_dump(mode="json", include={"id", "source", "question", "solution", "answer"})
        for _, problem in sorted(first.items())
    ]
