"""The problems as a data frame with the columns that expectations are about, one row per line of their files.

A column is None where it does not apply, such as the length of a solution in the test split; Great Expectations ignores
such rows.
"""

import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from components.grading.verifier import has_reasoning
from components.shared import jsonl
from components.shared.problem import Problem, Split, problems_file, splits_in
from components.shared.tokenizer import token_lengths
from components.validate_data.config import ValidateConfig
from components.validate_data.gradable import grades

LABEL = "row"
_COLUMNS = [
    *(LABEL, "place", "problem", "columns", "defect", *(f"in_{split}" for split in Split), "split_matches_file"),
    *("answer", "grade", "copies", "twin", "answer_share", "prompt_tokens"),
    *("copies_held_out", "held_out_twin", "has_solution", "worked", "solution_tokens"),
]
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})
_QUANTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
_MAX_BINS = 30
_HELD_OUT = {Split.TRAIN: (Split.TEST, Split.DEV), Split.DEV: (Split.TEST,), Split.TEST: ()}
"""For each split, the splits whose questions must not occur in it."""
_NUM_ANSWERS = 6
"""Most common answers of a split on the page."""


def build_frame(folder: Path, config: ValidateConfig) -> pd.DataFrame:
    """Return every row of all splits, valid or not; PipelineError for a file that is missing or not JSON lines."""
    rows = [row for split in splits_in(folder) for row in _read_split(problems_file(folder, split), split)]
    valid_rows = [row for row in rows if row["problem"]]
    columns = _problem_columns([row["problem"] for row in valid_rows], config)
    for row, values in zip(valid_rows, columns, strict=True):
        row.update(values)
    return pd.DataFrame(rows, columns=_COLUMNS, dtype=object).replace({float("nan"): None})


def _read_split(path: Path, split: Split) -> Iterator[dict[str, Any]]:
    """Yield a row of the frame for each line of a split's file, without the columns that only valid problems have."""
    required = {key for key, field in Problem.model_fields.items() if field.is_required()}
    for number, values in jsonl.read_rows(path):
        name, place = values.get("id"), f"{path.name}:{number}"
        problem, defect = _parse(values)
        missing, unknown = required - values.keys(), values.keys() - Problem.model_fields.keys()
        column_defects = [*(f"lacks {key}" for key in sorted(missing)), *(f"has {key}" for key in sorted(unknown))]
        yield {
            LABEL: name if isinstance(name, str) and name.strip() else place,
            "place": place,
            "problem": problem,
            "columns": ", ".join(column_defects),
            "defect": defect,
            **{f"in_{each}": int(split == each) for each in Split},
            "split_matches_file": int(problem.split == split) if problem else None,
        }


def _parse(values: dict[str, Any]) -> tuple[Problem | None, str]:
    """Return the problem in a row and an empty text, or None and what is wrong with the row."""
    try:
        # From JSON, strict mode takes a string for the split, and still refuses "3" as a level.
        problem = Problem.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        return None, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}"
    for name in ("id", "source", "question", "answer"):
        if not getattr(problem, name).strip():
            return None, f"{name}: is blank"
    return problem, ""


def _problem_columns(problems: Sequence[Problem], config: ValidateConfig) -> list[dict[str, Any]]:
    """Return the columns of each problem, without those that do not apply to it; `copies` counts the problem itself."""
    questions = [_normalised(problem.conversation) for problem in problems]
    ids = defaultdict(list)  # of the problems of a split with the same question
    for problem, question in zip(problems, questions, strict=True):
        ids[problem.split, question].append(problem.id)
    answers = Counter((problem.split, problem.answer) for problem in problems)
    sizes = Counter(problem.split for problem in problems)
    is_imitated = config.num_sft_steps > 0
    verdicts = grades(problems, config.model.answer, imitated=is_imitated)
    prompt_tokens, solution_tokens = token_lengths(config.model, problems)
    # Without any solution there is no fine-tuning, so none is missing.
    any_solution = any(problem.solution.strip() for problem in problems if problem.split == Split.TRAIN)
    rows = []
    for index, problem in enumerate(problems):
        copies = ids[problem.split, questions[index]]
        copies_held_out = [id_ for split in _HELD_OUT[problem.split] for id_ in ids[split, questions[index]]]
        row = {
            "answer": problem.answer,
            "grade": verdicts[index],
            "copies": len(copies),
            "twin": next((name for name in copies if name != problem.id), None),
            "answer_share": answers[problem.split, problem.answer] / sizes[problem.split],
            "prompt_tokens": prompt_tokens[index],
        }
        if problem.split != Split.TEST:
            row |= {"copies_held_out": len(copies_held_out), "held_out_twin": next(iter(copies_held_out), None)}
        if problem.split == Split.TRAIN and any_solution:
            row["has_solution"] = int(bool(problem.solution.strip()))
        if problem.split == Split.TRAIN and problem.solution.strip():
            row["solution_tokens"] = solution_tokens[index]
            if is_imitated:
                row["worked"] = int(has_reasoning(problem.solution_for(config.model.answer), config.model.answer))
        rows.append(row)
    return rows


def _normalised(question: str) -> str:
    """Return a question for comparison, without white space, case and kinds of quotation mark."""
    return "".join(unicodedata.normalize("NFKC", question).translate(_QUOTES).casefold().split())


def describe(frame: pd.DataFrame) -> dict[str, Any]:
    """Return counts by source, subject and level, lengths, the most common answers, and one problem of each source."""
    problems: list[Problem] = list(frame["problem"].dropna())
    has_dev = any(problem.split == Split.DEV for problem in problems)
    splits = [split for split in Split if has_dev or split != Split.DEV]
    worked = frame["worked"].dropna()
    examples: dict[str, Problem] = {}  # the first problem of each source, in the train split if it has one
    for problem in sorted(problems, key=lambda problem: problem.split != Split.TRAIN):
        examples.setdefault(problem.source, problem)
    fields = {"id", "solution", "answer"}
    return {
        "sources": _counts((each, None) for each in problems),
        "subjects": _counts((each, each.subject) for each in problems if each.subject),
        "levels": _counts((each, each.level) for each in problems if each.level is not None),
        "prompt_tokens": _lengths(frame["prompt_tokens"]),
        "solution_tokens": _lengths(frame["solution_tokens"]),
        "answers": {str(split): _answers(problems, split) for split in splits},
        "worked_fraction": float(worked.mean()) if len(worked) else None,
        "examples": [
            {**problem.model_dump(mode="json", include=fields), "source": source, "question": problem.conversation}
            for source, problem in sorted(examples.items())
        ],
    }


def _counts(grouped: Iterable[tuple[Problem, str | int | None]]) -> list[dict[str, Any]]:
    """Return the numbers of problems in each split by source and group, from pairs of a problem and its group."""
    counts = Counter((problem.source, group, problem.split) for problem, group in grouped)
    groups = sorted({(source, group) for source, group, _ in counts}, key=lambda each: (each[0], each[1] or 0))
    return [
        {"source": source, "group": group, **{str(split): counts[source, group, split] for split in Split}}
        for source, group in groups
    ]


def _lengths(column: pd.Series) -> dict[str, Any] | None:
    """Return quantiles and a histogram of token counts; None if there is no text."""
    tokens = sorted(int(value) for value in column.dropna())
    if not tokens:
        return None
    start, last_index = tokens[0], len(tokens) - 1
    width = (tokens[-1] - start) // _MAX_BINS + 1  # of a bin, in tokens
    bins = Counter((value - start) // width for value in tokens)
    return {
        "texts": len(tokens),
        **{name: tokens[round(rank * last_index)] for name, rank in _QUANTILES.items()},
        "histogram": {"start": start, "width": width, "counts": [bins[index] for index in range(max(bins) + 1)]},
    }


def _answers(problems: Sequence[Problem], split: Split) -> dict[str, Any]:
    """Return the number of distinct answers in a split, and the most common ones, ties in alphabetical order."""
    answers = Counter(problem.answer for problem in problems if problem.split == split)
    ranked = sorted(answers.items(), key=lambda item: (-item[1], item[0]))[:_NUM_ANSWERS]
    commonest = [{"answer": answer, "rows": rows, "fraction": rows / answers.total()} for answer, rows in ranked]
    return {"distinct": len(answers), "commonest": commonest}
