"""Checks that wait for others, made at the same time, each with a deadline."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from components.shared.errors import PipelineError

Check = Callable[[], Any]


def side_by_side(checks: Mapping[str, Check], deadline_s: float) -> dict[str, Any]:
    """Return what each check returns, or the PipelineError that it raised, or one that says it gave no answer in time.

    Nobody waits longer than `deadline_s`: threads that hang are left behind, and go with the process.
    """
    answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    for name, check in checks.items():
        threading.Thread(target=_answer, args=(name, check, answers), daemon=True).start()
    late = PipelineError(f"no answer within {deadline_s:g} s; the network or a service is down")
    found: dict[str, Any] = {}
    end = time.monotonic() + deadline_s
    while len(found) < len(checks):
        try:
            name, answer = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(answer, Exception) and not isinstance(answer, PipelineError):
            raise answer
        found[name] = answer
    return {name: found.get(name, late) for name in checks}


def _answer(name: str, check: Check, answers: "queue.SimpleQueue[tuple[str, Any]]") -> None:
    try:
        answers.put((name, check()))
    except Exception as error:  # whatever it is, the thread that asked has to know
        answers.put((name, error))
