"""What there is to know about each row, as one table: the columns that the expectations are about.

A column holds None where it has nothing to say, as for a solution's length in the test split; Great Expectations
leaves such rows out of the count.
"""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pandas as pd

from components.grading.verifier import Submission, Verifier, has_reasoning
from components.shared.answer_policy import AnswerPolicy
from components.shared.problem import Problem, Split
from components.shared.tokenizer import tokenizer_for
from components.validate_data.config import ValidateConfig
from components.validate_data.rows import Row

LABEL = "row"
_COLUMNS = [
    *(LABEL, "split", "source", "answer", "column_defect", "defect", "in_train", "in_test", "says_its_split"),
    *("grade", "has_solution", "worked", "copies", "copies_in_test", "answer_share"),
    *("prompt_tokens", "solution_tokens", "place", "twin", "test_twin"),
]
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})


def derive(rows: Sequence[Row], config: ValidateConfig) -> pd.DataFrame:
    """Return one line per row; what a row that is no problem cannot say is None."""
    problems = [row.problem for row in rows if row.problem]
    about = iter(_about_problems(problems, config))
    lines = [_about_row(row) | (next(about) if row.problem else {}) for row in rows]
    return pd.DataFrame(lines, columns=_COLUMNS, dtype=object).replace({float("nan"): None})


def normalised(question: str) -> str:
    """Return a question as it is compared: white space, capitals and kinds of quotation mark make no difference."""
    return "".join(unicodedata.normalize("NFKC", question).translate(_QUOTES).casefold().split())


def _about_row(row: Row) -> dict[str, Any]:
    lacking, unknown = set(Problem.model_fields) - row.columns, row.columns - set(Problem.model_fields)
    defects = [f"{word} {name}" for word, names in (("lacks", lacking), ("has", unknown)) for name in sorted(names)]
    return {
        LABEL: row.label,
        "place": row.place,
        "split": str(row.split),
        "column_defect": ", ".join(defects),
        "defect": row.defect,
        "in_train": int(row.split == Split.TRAIN),
        "in_test": int(row.split == Split.TEST),
        "says_its_split": int(row.problem.split == row.split) if row.problem else None,
    }


def _about_problems(problems: Sequence[Problem], config: ValidateConfig) -> list[dict[str, Any]]:
    questions = [normalised(problem.question) for problem in problems]
    asked = defaultdict(list)
    for problem, question in zip(problems, questions, strict=True):
        asked[problem.split, question].append(problem.id)
    answers = Counter((problem.split, problem.answer) for problem in problems)
    sizes = Counter(problem.split for problem in problems)
    prompt_tokens, solution_tokens = _lengths(problems, config)
    verdicts = _graded_against_themselves(problems, config.model.answer)
    return [
        {
            "source": problem.source,
            "answer": problem.answer,
            "grade": verdicts[index],
            "copies": len(asked[problem.split, question]),
            "twin": next((twin for twin in asked[problem.split, question] if twin != problem.id), None),
            "answer_share": answers[problem.split, problem.answer] / sizes[problem.split],
            "prompt_tokens": prompt_tokens[index],
        }
        | (
            {
                "copies_in_test": len(asked[Split.TEST, question]),
                "test_twin": next(iter(asked[Split.TEST, question]), None),
                "has_solution": int(bool(problem.solution.strip())),
                "worked": int(has_reasoning(problem.solution, config.model.answer)),
                "solution_tokens": solution_tokens[index],
            }
            if problem.split == Split.TRAIN
            else {}
        )
        for index, (problem, question) in enumerate(zip(problems, questions, strict=True))
    ]


def _graded_against_themselves(problems: Sequence[Problem], policy: AnswerPolicy) -> list[str]:
    """What the grader says of each problem's own solution, or of its boxed answer where it has none."""
    submissions = [
        Submission(problem.answer, problem.solution, policy)
        if problem.solution.strip()
        else Submission(problem.answer, rf"\boxed{{{problem.answer}}}", AnswerPolicy.BOXED)
        for problem in problems
    ]
    with Verifier() as verify:
        return [str(grade.verdict) for grade in verify(submissions)]


def _lengths(problems: Sequence[Problem], config: ValidateConfig) -> tuple[list[int], list[int]]:
    """Tokens of each prompt and of each solution, counted with the tokenizer that the model is trained with."""
    if not problems:
        return [], []
    train = [problem for problem in problems if problem.split == Split.TRAIN]
    tokenizer = tokenizer_for(config.model, train or problems)
    # With special tokens: a model that begins its texts with one begins its prompts with it, too.
    prompts = tokenizer.encode_batch([config.model.ask(problem.question) for problem in problems])
    solutions = tokenizer.encode_batch([problem.solution for problem in problems], add_special_tokens=False)
    return [len(encoding.ids) for encoding in prompts], [len(encoding.ids) for encoding in solutions]
