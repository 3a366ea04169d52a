"""Grades cases with one grader: `python verifier_side.py GRADER NUM_PROCESSES WARM_UP.json CASES.json RESULTS.json`.

The peers run in an environment that needs nothing of this project, each in the main thread of its process and with
its own time limits, as trainers call them.
"""

import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Cases = list[dict[str, Any]]
Grader = Callable[[Cases], list[str]]
"""From cases to "right", "wrong" or "unscorable" for each."""


def main(name: str, num_processes: str, warm_up: Path, cases: Path, results: Path) -> None:
    """Write the times and verdicts."""
    logging.disable()
    first, measured = (json.loads(path.read_text(encoding="utf-8")) for path in (warm_up, cases))
    # Processes of their own for each, as a grader may remember what it has seen.
    with _started(name, int(num_processes), first) as (grade, start_s, start_cpu_s):
        wall, processor = time.perf_counter(), processor_s()
        verdicts = grade(measured)
        figures = {"batch_s": time.perf_counter() - wall, "batch_cpu_s": processor_s() - processor}
    latencies_s = []
    with _started(name, int(num_processes), first) as (grade, _, _):
        for case in measured:
            wall = time.perf_counter()
            grade([case])
            latencies_s.append(time.perf_counter() - wall)
    figures |= {"start_s": start_s, "start_cpu_s": start_cpu_s, "verdicts": verdicts, "latencies_s": latencies_s}
    results.write_text(json.dumps(figures), encoding="utf-8")


@contextmanager
def _started(name: str, num_processes: int, warm_up: Cases) -> Iterator[tuple[Grader, float, float]]:
    """A grader whose processes run and have done whatever is done once; the seconds and processor time that it took."""
    wall, processor = time.perf_counter(), processor_s()
    with _GRADERS[name](num_processes) as grade:
        grade(warm_up)
        yield grade, time.perf_counter() - wall, processor_s() - processor


def processor_s() -> float:
    """Return the processor time that this process and all below it have used."""
    used, below = time.process_time(), [os.getpid()]
    while below:
        for path in Path("/proc").glob(f"{below.pop()}/task/*/children"):
            with suppress(OSError):  # it has ended
                children = [int(child) for child in path.read_text(encoding="ascii").split()]
                used += sum(time.clock_gettime((~child << 3) | 2) for child in children)
                below += children
    return used


def _verify(case: dict[str, Any]) -> str:
    from math_verify import parse, verify

    return "right" if verify(parse(rf"\boxed{{{case['gold']}}}"), parse(case["response"])) else "wrong"


@contextmanager
def _math_verify(num_processes: int) -> Iterator[Grader]:
    if num_processes == 1:
        yield lambda cases: list(map(_verify, cases))
        return
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield lambda cases: pool.map(_verify, cases, chunksize=8)


@contextmanager
def _trl(_: int) -> Iterator[Grader]:
    from trl.rewards import accuracy_reward

    def grade(cases: Cases) -> list[str]:
        completions = [[{"role": "assistant", "content": case["response"]}] for case in cases]
        rewards = accuracy_reward(completions, [rf"\boxed{{{case['gold']}}}" for case in cases])
        return ["unscorable" if reward is None else "right" if reward else "wrong" for reward in rewards]

    yield grade


@contextmanager
def _own(num_processes: int) -> Iterator[Grader]:
    from components.grading.verifier import Submission, Verifier
    from components.shared.answer_policy import AnswerPolicy

    with Verifier(num_workers=num_processes) as verify:

        def grade(cases: Cases) -> list[str]:
            submissions = [Submission(case["gold"], case["response"], AnswerPolicy.STATED) for case in cases]
            return [each.verdict.value for each in verify(submissions)]

        yield grade


_GRADERS: dict[str, Any] = {"math_verify": _math_verify, "trl": _trl, "own": _own}

if __name__ == "__main__":
    main(*sys.argv[1:3], *map(Path, sys.argv[3:]))
