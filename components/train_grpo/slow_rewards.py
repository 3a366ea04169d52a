"""Slow rewards, which wait for a server: an `async def` or a function marked `threaded_reward`, called concurrently.

Each call has a timeout, and is repeated after a transient error (ConnectionError, TimeoutError, RetryableError). All
calls of a rollout together have a deadline. A call without an answer leaves its completion without a reward, and keeps
the reason; it never counts as 0.

Answers are stored in a file of the run, by reward, problem and text: a resumed run learns from the same numbers, and no
text is sent twice.
"""

import asyncio
import hashlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field

from components.shared import jsonl
from components.shared.config import Config, Operational
from components.shared.errors import RetryableError
from components.shared.problem import Problem
from components.shared.progress import say
from components.train_grpo.custom_rewards import Failure, RewardFunction, failure_of

if TYPE_CHECKING:  # judge.py imports this module
    from components.train_grpo.judge import JudgeConfig

_T = TypeVar("_T")
_TRANSIENT = (ConnectionError, TimeoutError, RetryableError)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_REPORT_S = 20.0
"""Time without an answer after which a line says how many calls are answered."""


class RewardCallsConfig(Config):
    """Calls of rewards that wait: of `async def` functions, of those marked `threaded_reward`, and of `judge`."""

    max_concurrency: Annotated[int, Operational] = Field(32, gt=0)
    """Calls at once, in each process."""
    timeout_s: Annotated[float, Operational] = Field(60, gt=0)
    """Time for one call."""
    max_tries: Annotated[int, Operational] = Field(3, gt=0)
    """Tries of a call that fails with ConnectionError, TimeoutError or RetryableError; pauses between them double."""
    deadline_s: Annotated[float, Operational] = Field(300, gt=0)
    """Time for all calls of a rollout; what is not answered by then has no reward."""


@dataclass(frozen=True)
class Call:
    """A call of a reward for a completion, or for all completions of a group."""

    reward: str
    key: str
    """Problem and texts, as JSON: calls of a reward with equal keys have the same answer."""
    function: Callable[[], Any]
    """Returns the answer or, without `in_thread`, an awaitable of it."""
    in_thread: bool


def calls_for(name: str, function: RewardFunction, problem: Problem, scored_G: Sequence[Any]) -> list[Call]:
    """Return the calls of a slow reward for a group: one for each completion, or a single one."""
    in_thread = getattr(function, "runs_in_thread", False)
    if getattr(function, "compares_group", False):
        key = json.dumps([problem.id, *(scored.completion.text for scored in scored_G)])
        completions_G, grades_G = [each.completion for each in scored_G], [each.grade for each in scored_G]
        return [Call(name, key, partial(function, problem, completions_G, grades_G), in_thread)]
    calls = []
    for scored in scored_G:
        key = json.dumps([problem.id, scored.completion.text])
        calls.append(Call(name, key, partial(function, problem, scored.completion, scored.grade), in_thread))
    return calls


class Answers:
    """Answers to calls, as JSON values, in memory and in a file to which each is appended as soon as it arrives."""

    def __init__(self, folder: Path | None = None, *, rank: int = 0) -> None:
        """Read the answers that all processes stored in `folder` before a restart; None stores nothing."""
        self._path = folder / f"rank-{rank}.jsonl" if folder else None
        self._known: dict[str, Any] = {row["call"]: row["value"] for row in _rows(folder)} if folder else {}
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, calls: Sequence[Call], limits: RewardCallsConfig) -> list[Any]:
        """Return the answer to each call, or a Failure; calls with a stored answer are not made."""
        ids = [hashlib.sha256(f"{call.reward}\n{call.key}".encode()).hexdigest() for call in calls]
        missing = {id_: call for id_, call in zip(ids, calls, strict=True) if id_ not in self._known}
        failures = asyncio.run(self._make(missing, limits)) if missing else {}
        return [failures[id_] if id_ in failures else self._known[id_] for id_ in ids]

    async def _make(self, calls: dict[str, Call], limits: RewardCallsConfig) -> dict[str, Failure]:
        """Make calls, by id; store their answers, and return the failures."""
        semaphore, deadline = asyncio.Semaphore(limits.max_concurrency), time.monotonic() + limits.deadline_s
        id_of = {asyncio.ensure_future(_answer(call, limits, semaphore)): id_ for id_, call in calls.items()}
        failures: dict[str, Failure] = {}
        waiting = set(id_of)
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            done, waiting = await asyncio.wait(waiting, timeout=min(left_s, _REPORT_S), return_when="FIRST_COMPLETED")
            for task in done:
                id_, answer = id_of[task], task.result()
                if isinstance(answer, Failure):
                    failures[id_] = answer
                else:
                    self._store(id_, calls[id_].reward, answer)
            if not done and time.monotonic() < deadline:
                say("train_grpo", f"{len(id_of) - len(waiting):,} of {len(id_of):,} calls of rewards are answered")
        for task in waiting:
            task.cancel()
            kind = f"reward {calls[id_of[task]].reward} did not answer"
            failures[id_of[task]] = Failure(kind, f"{kind} within {limits.deadline_s:g} s, the time for a rollout")
        return failures

    def _store(self, id_: str, reward: str, answer: dict[str, Any]) -> None:
        """Keep an answer in memory and, with a folder, in the file of this process."""
        self._known[id_] = answer["value"]
        if self._path:
            row = {"call": id_, "reward": reward, **answer}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps(row)}")  # the newline first: it ends the partial line of a killed process


def in_thread(call: Callable[[], _T]) -> "Future[_T]":
    """Return the future result of a call in a daemon thread, which does not keep the process alive."""
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # an uncaught one would leave the caller waiting forever
            failure: BaseException = error
            if not isinstance(error, Exception) or isinstance(error, CancelledError):  # these would end the caller
                failure = RuntimeError(f"it raised {type(error).__name__}: {error}".removesuffix(": "))
                failure.__cause__ = error
            result.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    return result


class RewardWithUsage(float):
    """The value of a slow reward, with the numbers of tokens that a server counted for it."""

    prompt_tokens = 0
    completion_tokens = 0


def write_totals(folder: Path, path: Path, judge: "JudgeConfig | None") -> None:
    """Write to `path` and print the totals of the answers in `folder`, by reward: calls, seconds, tokens and cost."""
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in _rows(folder):
        total = totals[row["reward"]]
        total["calls"] += 1
        for key in ("seconds", "prompt_tokens", "completion_tokens"):
            total[key] += row[key]
    for reward, total in totals.items():
        line = f"reward {reward}: {total['calls']:,.0f} answers, {total['seconds'] / total['calls']:.2f} s each"
        if tokens := total["prompt_tokens"] + total["completion_tokens"]:
            line += f", {tokens:,.0f} tokens"
        if reward == "judge" and judge:
            costs = judge.prompt_price * total["prompt_tokens"], judge.completion_price * total["completion_tokens"]
            total["cost"] = sum(costs) / 1e6  # prices are per million tokens
            if total["cost"]:
                line += f", cost {total['cost']:,.2f}"
        say("train_grpo", line)
    if totals:
        jsonl.write_json(path, totals)


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the answers stored in a folder, without partial lines of killed processes."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


async def _answer(call: Call, limits: RewardCallsConfig, semaphore: asyncio.Semaphore) -> dict[str, Any] | Failure:
    """Return the answer to a call with its seconds and tokens, or a Failure after its last try."""
    pause_s = _FIRST_PAUSE_S
    for tries_left in reversed(range(limits.max_tries)):
        async with semaphore:
            started = time.monotonic()
            try:
                # Not in a thread pool, whose end would wait for a function that does not return.
                awaitable = asyncio.wrap_future(in_thread(call.function)) if call.in_thread else call.function()
                value = await asyncio.wait_for(awaitable, limits.timeout_s)
                tokens = {key: getattr(value, key, 0) for key in ("prompt_tokens", "completion_tokens")}
                return {"value": _plain(value), "seconds": time.monotonic() - started, **tokens}
            except _TRANSIENT as error:
                last_error: Exception = error
                if isinstance(error, TimeoutError) and not str(error):  # that of wait_for
                    last_error = TimeoutError(f"no answer within {limits.timeout_s:g} s")
            except Exception as error:  # a custom reward may fail in any way
                return failure_of(call.reward, error)
        if tries_left:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return failure_of(call.reward, last_error)


def _plain(value: Any) -> Any:
    """Return numbers of any library as JSON values: one as a float, an iterable of them as a list."""
    is_scalar = isinstance(value, str) or getattr(value, "shape", None) == ()  # an array without axes is iterable
    if isinstance(value, Iterable) and not is_scalar:
        return [_plain(each) for each in value]
    return float(value)
