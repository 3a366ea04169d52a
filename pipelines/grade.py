"""`grpo-pipeline grade`: the grader by itself, for anybody's responses."""

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Never

from tqdm import tqdm

from components.grading.verifier import Grade, Submission, Verdict, Verifier
from components.shared import jsonl
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError

STANDARD_INPUT = "-"
_CHUNK_BYTES = 1 << 20
_ACCEPTED = "expected one JSON object per line, with the strings `gold` and `response`"


def grade(name: str, policy: AnswerPolicy) -> None:
    """Print a verdict for each line of a file, as soon as there is one; lines without text are left out."""
    counts: Counter[Verdict] = Counter()
    where = "standard input" if name == STANDARD_INPUT else name
    with _opened(name) as file, Verifier() as verify, _bar() as bar:
        for submissions, error in _chunks(file, where, policy):
            grades = verify(submissions)
            try:
                _print(grades)
            except BrokenPipeError:  # whoever reads has seen enough
                return _hold_back_the_rest()
            counts.update(each.verdict for each in grades)
            bar.update(len(grades))
            if error:
                raise error
    if not counts:
        raise PipelineError(f"{where}: holds no response; {_ACCEPTED}")
    print(", ".join(f"{counts[verdict]:,} {verdict}" for verdict in Verdict), file=sys.stderr)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == STANDARD_INPUT:
        yield sys.stdin.buffer
    else:
        with Path(name).open("rb") as file:
            yield file


def _bar() -> "tqdm[Never]":
    return tqdm(desc="grade", unit=" responses", leave=False, file=sys.stderr, disable=not sys.stderr.isatty())


def _chunks(
    file: BinaryIO, where: str, policy: AnswerPolicy
) -> Iterator[tuple[list[Submission], PipelineError | None]]:
    """As much as there is to read at once, again and again, and what is wrong with the line after it."""
    number = 0
    for lines in _lines(file):
        submissions = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                submissions.append(_submission(line, f"{where}:{number}", policy))
            except PipelineError as error:
                yield submissions, error
        yield submissions, None


def _lines(file: BinaryIO) -> Iterator[list[bytes]]:
    """Whole lines; of a pipe those that have arrived, so that nobody waits for a verdict until a chunk is full."""
    parts: list[bytes] = []
    while read := file.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
        before, newline, after = read.rpartition(b"\n")
        if newline:
            yield b"".join([*parts, before]).split(b"\n")
            parts = []
        parts.append(after)
    yield [b"".join(parts)]


def _submission(line: bytes, where: str, policy: AnswerPolicy) -> Submission:
    try:
        row = jsonl.parse_object(line, where=where)
    except PipelineError as error:
        raise PipelineError(f"{error}; {_ACCEPTED}") from None
    for key in ("gold", "response"):
        if key not in row:
            raise PipelineError(f"{where}: has no `{key}`; {_ACCEPTED}")
        if not isinstance(row[key], str):
            raise PipelineError(f"{where}: `{key}` is no string but {json.dumps(row[key]):.40}; {_ACCEPTED}")
    return Submission(row["gold"], row["response"], policy)


def _print(grades: list[Grade]) -> None:
    for each in grades:
        print(json.dumps({"verdict": each.verdict, "extracted": each.extracted, "reason": each.reason}))
    sys.stdout.flush()


def _hold_back_the_rest() -> None:
    """Keep Python from complaining, when it ends, of what it cannot write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
