"""`grpo-pipeline grade`: grades the responses in a file or from a pipe."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, Never

from tqdm import tqdm

from components.grading.explain import EXPLAIN
from components.grading.verifier import GRADE, Grade, Submission, Verdict, Verifier
from components.shared import jsonl
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError

_STANDARD_INPUT = "-"
_CHUNK_BYTES = 1 << 20
_ACCEPTED = "expected one JSON object per line, with the strings `gold` and `response`, and `question` if it is known"


def grade(file: str, answer: str, *, explain: bool) -> None:
    """Print the verdict on each response in a file, or on standard input for `-`, as soon as it is known.

    `answer` is an AnswerPolicy: where a response has to state its answer. With `explain` a verdict is a text for
    people, not JSON.
    """
    counts: Counter[Verdict] = Counter()
    policy, where = AnswerPolicy(answer), "standard input" if file == _STANDARD_INPUT else file
    # With `disable=None` the bar is shown on a terminal only.
    bar: tqdm[Never] = tqdm(desc="grade", unit=" responses", leave=False, file=sys.stderr, disable=None)
    with (
        nullcontext(sys.stdin.buffer) if file == _STANDARD_INPUT else Path(file).open("rb") as stream,
        Verifier(function=EXPLAIN if explain else GRADE) as verify,
        bar,
    ):
        for submissions in _batches(stream, where, policy):
            grades = verify(submissions)
            for each in grades:
                print(_explanation(each) if explain else json.dumps(_row(each)))
            sys.stdout.flush()
            counts.update(each.verdict for each in grades)
            bar.update(len(grades))
    if not counts:
        raise PipelineError(f"{where}: has no responses; {_ACCEPTED}")
    print(", ".join(f"{counts[verdict]:,} {verdict}" for verdict in Verdict), file=sys.stderr)


def _explanation(grade: Grade) -> str:
    """Return the lines that EXPLAIN wrote, or verdict and rule if the grader was killed before it could."""
    if "\n" in grade.detail:
        return f"{grade.detail}\n"
    return f"verdict   {grade.verdict}: {grade.why}\nrule      {grade.reason.rule}\n"


def _row(grade: Grade) -> dict[str, str | None]:
    """Return a grade as a row of JSON."""
    row = {"verdict": grade.verdict, "extracted": grade.extracted, "reason": grade.reason}
    return {**row, "detail": grade.detail} if grade.detail else row


def _batches(file: BinaryIO, where: str, policy: AnswerPolicy) -> Iterator[list[Submission]]:
    """Yield the submissions of each read; those before a bad line are yielded before its PipelineError is raised."""
    number = 0
    for lines in _lines(file):
        submissions = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                submissions.append(_submission(line, f"{where}:{number}", policy))
            except PipelineError:
                yield submissions
                raise
        yield submissions


def _lines(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield lists of complete lines, from a pipe as they arrive: no verdict waits for a full chunk."""
    rest = b""
    while block := file.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
        *complete, rest = (rest + block).split(b"\n")
        yield complete
    yield [rest]


def _submission(line: bytes, where: str, policy: AnswerPolicy) -> Submission:
    """Return the submission in one line of JSON; PipelineError, which begins with `where`, if it is malformed."""
    try:
        row = jsonl.parse_object(line, where=where)
    except PipelineError as error:
        raise PipelineError(f"{error}; {_ACCEPTED}") from None
    row = {"question": ""} | row
    for key in ("gold", "response", "question"):
        if not isinstance(row.get(key), str):
            problem = f"is {json.dumps(row[key]):.40}, not a string" if key in row else "is missing"
            raise PipelineError(f"{where}: `{key}` {problem}; {_ACCEPTED}")
    return Submission(row["gold"], row["response"], policy, row["question"])
