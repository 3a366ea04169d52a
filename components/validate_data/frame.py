"""The problems as data: one `Row` per line of their files, and a frame with the columns that expectations are about.

A column is None where it does not apply, as the length of a solution in the test split; Great Expectations leaves such
rows out of the count.
"""

import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from components.grading.verifier import Submission, Verifier, has_reasoning
from components.shared import jsonl
from components.shared.answer_policy import AnswerPolicy
from components.shared.problem import Problem, Split, problems_file
from components.shared.tokenizer import tokenizer_for
from components.validate_data.config import ValidateConfig

LABEL = "row"
_COLUMNS = [
    *(LABEL, "split", "source", "answer", "column_defect", "defect", "in_train", "in_test", "split_matches_file"),
    *("grade", "has_solution", "worked", "copies", "copies_in_test", "answer_share"),
    *("prompt_tokens", "solution_tokens", "place", "twin", "test_twin"),
]
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})
_QUANTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
_MAX_BINS = 30
_NUM_ANSWERS = 6


@dataclass(frozen=True)
class Row:
    """One line of a split's file, valid or not."""

    label: str
    """Its id, or file and line if it has none."""
    place: str
    """Its file and line."""
    split: Split
    """The split whose file it is in."""
    columns: frozenset[str]
    problem: Problem | None
    """None for a row that is not a valid problem."""
    defect: str
    """Why it is not valid; otherwise empty."""


def load_rows(folder: Path) -> list[Row]:
    """Return every row of both splits; PipelineError for a file that is missing or not JSON lines."""
    return [row for split in Split for row in _read_split(problems_file(folder, split), split)]


def _read_split(path: Path, split: Split) -> Iterator[Row]:
    for number, values in jsonl.read_rows(path):
        problem, defect = _parse(values)
        label, place = values.get("id"), f"{path.name}:{number}"
        has_label = isinstance(label, str) and label.strip()
        yield Row(str(label) if has_label else place, place, split, frozenset(values), problem, defect)


def _parse(values: dict[str, Any]) -> tuple[Problem | None, str]:
    """Return the problem in a row, or None and what is wrong with it."""
    try:
        # Strict, as JSON: the level "3" is not the level 3.
        problem = Problem.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        return None, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}"
    blank = next((name for name in ("id", "source", "question", "answer") if not getattr(problem, name).strip()), None)
    return (None, f"{blank}: is blank") if blank else (problem, "")


def build_frame(rows: Sequence[Row], config: ValidateConfig) -> pd.DataFrame:
    """Return one line per row; what does not apply to it is None."""
    problems = [row.problem for row in rows if row.problem]
    problem_columns = iter(_problem_columns(problems, config))
    lines = [_row_columns(row) | (next(problem_columns) if row.problem else {}) for row in rows]
    return pd.DataFrame(lines, columns=_COLUMNS, dtype=object).replace({float("nan"): None})


def _row_columns(row: Row) -> dict[str, Any]:
    missing, unknown = set(Problem.model_fields) - row.columns, row.columns - set(Problem.model_fields)
    defects = [f"{word} {name}" for word, names in (("lacks", missing), ("has", unknown)) for name in sorted(names)]
    return {
        LABEL: row.label,
        "place": row.place,
        "split": str(row.split),
        "column_defect": ", ".join(defects),
        "defect": row.defect,
        "in_train": int(row.split == Split.TRAIN),
        "in_test": int(row.split == Split.TEST),
        "split_matches_file": int(row.problem.split == row.split) if row.problem else None,
    }


def _problem_columns(problems: Sequence[Problem], config: ValidateConfig) -> list[dict[str, Any]]:
    questions = [_normalised(problem.question) for problem in problems]
    ids = defaultdict(list)
    for problem, question in zip(problems, questions, strict=True):
        ids[problem.split, question].append(problem.id)
    answers = Counter((problem.split, problem.answer) for problem in problems)
    sizes = Counter(problem.split for problem in problems)
    prompt_tokens, solution_tokens = _token_counts(problems, config)
    lines = []
    for index, (problem, grade) in enumerate(zip(problems, _grades(problems, config.model.answer), strict=True)):
        same, same_in_test = ids[problem.split, questions[index]], ids[Split.TEST, questions[index]]
        line = {
            "source": problem.source,
            "answer": problem.answer,
            "grade": grade,
            "copies": len(same),
            "twin": next((each for each in same if each != problem.id), None),
            "answer_share": answers[problem.split, problem.answer] / sizes[problem.split],
            "prompt_tokens": prompt_tokens[index],
        }
        if problem.split == Split.TRAIN:
            line |= {
                "copies_in_test": len(same_in_test),
                "test_twin": next(iter(same_in_test), None),
                "has_solution": int(bool(problem.solution.strip())),
                "worked": int(has_reasoning(problem.solution, config.model.answer)),
                "solution_tokens": solution_tokens[index],
            }
        lines.append(line)
    return lines


def _normalised(question: str) -> str:
    """Return a question without differences in white space, case and kinds of quotation mark."""
    return "".join(unicodedata.normalize("NFKC", question).translate(_QUOTES).casefold().split())


def _grades(problems: Sequence[Problem], policy: AnswerPolicy) -> list[str]:
    """Return the verdict on each problem's own solution, or on its boxed answer if it has none."""
    submissions = [
        Submission(problem.answer, problem.solution, policy)
        if problem.solution.strip()
        else Submission(problem.answer, rf"\boxed{{{problem.answer}}}", AnswerPolicy.BOXED)
        for problem in problems
    ]
    with Verifier() as verify:
        return [str(grade.verdict) for grade in verify(submissions)]


def _token_counts(problems: Sequence[Problem], config: ValidateConfig) -> tuple[list[int], list[int]]:
    """Count the tokens of each prompt and of each solution with the tokenizer of the model to train."""
    if not problems:
        return [], []
    train = [problem for problem in problems if problem.split == Split.TRAIN]
    tokenizer = tokenizer_for(config.model, train or problems)
    # With special tokens: a model that begins its texts with one begins its prompts with it, too.
    prompts = tokenizer.encode_batch([config.model.ask(problem.question) for problem in problems])
    solutions = tokenizer.encode_batch([problem.solution for problem in problems], add_special_tokens=False)
    return [len(encoding.ids) for encoding in prompts], [len(encoding.ids) for encoding in solutions]


def describe(frame: pd.DataFrame, rows: Sequence[Row]) -> dict[str, Any]:
    """Return counts by source, subject and level, lengths, the commonest answers, and one problem of each source."""
    problems = [row.problem for row in rows if row.problem]
    worked = frame["worked"].dropna()
    first_of_source: dict[str, Problem] = {}  # in the train split if it has one
    for problem in sorted(problems, key=lambda problem: problem.split != Split.TRAIN):
        first_of_source.setdefault(problem.source, problem)
    shown = {"id", "source", "question", "solution", "answer"}
    return {
        "sources": _counts(((problem.source, None), problem.split) for problem in problems),
        "subjects": _counts(((each.source, each.subject), each.split) for each in problems if each.subject),
        "levels": _counts(((each.source, each.level), each.split) for each in problems if each.level is not None),
        "prompt_tokens": _lengths(frame["prompt_tokens"]),
        "solution_tokens": _lengths(frame["solution_tokens"]),
        "answers": {str(split): _answers(problems, split) for split in Split},
        "worked_fraction": float(worked.mean()) if len(worked) else None,
        "examples": [each.model_dump(mode="json", include=shown) for _, each in sorted(first_of_source.items())],
    }


def _counts(members: Iterable[tuple[tuple[str, str | int | None], Split]]) -> list[dict[str, Any]]:
    """Return the rows of each split by source and group, in order."""
    counts = Counter(members)
    groups = sorted({group for group, _ in counts}, key=lambda group: (group[0], group[1] or ""))
    return [
        {"source": source, "group": name, **{str(split): counts[(source, name), split] for split in Split}}
        for source, name in groups
    ]


def _lengths(column: pd.Series) -> dict[str, Any] | None:
    """Return quantiles and a histogram of token counts; None if there is no text."""
    tokens = sorted(int(value) for value in column.dropna())
    if not tokens:
        return None
    width = max(1, -(-(tokens[-1] - tokens[0] + 1) // _MAX_BINS))
    bins = Counter((value - tokens[0]) // width for value in tokens)
    return {
        "texts": len(tokens),
        **{name: tokens[round(rank * (len(tokens) - 1))] for name, rank in _QUANTILES.items()},
        "histogram": {"start": tokens[0], "width": width, "counts": [bins[index] for index in range(max(bins) + 1)]},
    }


def _answers(problems: Sequence[Problem], split: Split) -> dict[str, Any]:
    answers = Counter(problem.answer for problem in problems if problem.split == split)
    ranked = sorted(answers.items(), key=lambda item: (-item[1], item[0]))[:_NUM_ANSWERS]
    commonest = [{"answer": answer, "rows": rows, "fraction": rows / answers.total()} for answer, rows in ranked]
    return {"distinct": len(answers), "commonest": commonest}
