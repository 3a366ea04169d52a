"""Grades the cases of verifier.py with one grader: `python verifier_side.py GRADER CASES.json RESULTS.json`.

The peers run in TRL's environment, which has nothing of this project, in the main thread and with their own time
limits, as trainers call them.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Cases = list[dict[str, Any]]
Grader = Callable[[Cases], list[str]]
"""From cases to "right", "wrong" or "unscorable" for each."""


def main(name: str, cases: Path, results: Path) -> None:
    """Write the times and verdicts."""
    logging.disable()
    with _GRADERS[name]() as grade:
        measured = _measure(grade, json.loads(cases.read_text(encoding="utf-8")))
    results.write_text(json.dumps(measured), encoding="utf-8")


def _measure(grade: Grader, cases: Cases) -> dict[str, Any]:
    """The time of all cases in one call, and of each case in a call of its own."""
    grade(cases[:100])  # whatever is done once is done
    started = time.perf_counter()
    verdicts = grade(cases)
    batch_s = time.perf_counter() - started
    latencies_s = []
    for case in cases:
        started = time.perf_counter()
        grade([case])
        latencies_s.append(time.perf_counter() - started)
    return {"verdicts": verdicts, "batch_s": batch_s, "latencies_s": latencies_s}


@contextmanager
def _math_verify() -> Iterator[Grader]:
    from math_verify import parse, verify

    def grade(cases: Cases) -> list[str]:
        return [
            "right" if verify(parse(rf"\boxed{{{case['gold']}}}"), parse(case["response"])) else "wrong"
            for case in cases
        ]

    yield grade


@contextmanager
def _trl() -> Iterator[Grader]:
    from trl.rewards import accuracy_reward

    def grade(cases: Cases) -> list[str]:
        completions = [[{"role": "assistant", "content": case["response"]}] for case in cases]
        rewards = accuracy_reward(completions, [rf"\boxed{{{case['gold']}}}" for case in cases])
        return ["unscorable" if reward is None else "right" if reward else "wrong" for reward in rewards]

    yield grade


def _own(num_workers: int | None) -> Any:
    @contextmanager
    def grader() -> Iterator[Grader]:
        from components.grading.verifier import Submission, Verifier
        from components.shared.answer_policy import AnswerPolicy

        with Verifier(num_workers=num_workers) as verify:

            def grade(cases: Cases) -> list[str]:
                submissions = [Submission(case["gold"], case["response"], AnswerPolicy.STATED) for case in cases]
                return [each.verdict.value for each in verify(submissions)]

            yield grade

    return grader


_GRADERS: dict[str, Any] = {"math_verify": _math_verify, "trl": _trl, "own_1": _own(1), "own": _own(None)}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
