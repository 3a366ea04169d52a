"""Rewards that wait: those of `async def`, and functions marked `threaded_reward`, are called many at a time.

Each call has a deadline and is made again after an error that is said to pass (ConnectionError, TimeoutError,
RetryableError). All calls of a rollout together have a deadline, too. A call that brings no value leaves its
completion without a reward, with the reason; it never counts as 0.

Answers are kept in a file of the run, by reward, problem and text: a resumed run learns from the same numbers, and no
text is sent twice.
"""

import asyncio
import hashlib
import inspect
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field

from components.shared import jsonl
from components.shared.config import Config, Operational
from components.shared.errors import RetryableError
from components.shared.problem import Problem
from components.shared.progress import say
from components.train_grpo.custom_rewards import Failure, RewardFunction, ask, failure_of, worth

if TYPE_CHECKING:  # it names `Priced`
    from components.train_grpo.judge import JudgeConfig

_T = TypeVar("_T")
_PASSING = (ConnectionError, TimeoutError, RetryableError)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_REPORT_S = 20.0
"""Between two lines that say how many calls are done."""


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
    """One question to a reward: about a completion, or about those of a group."""

    reward: str
    key: str
    """What is asked, as one text: equal keys have equal answers."""
    ask: Callable[[], Any]
    """Returns the answer, or what has to be awaited for it."""
    in_thread: bool


def is_slow(function: Callable[..., Any]) -> bool:
    """Return whether a reward is called concurrently."""
    return inspect.iscoroutinefunction(function) or getattr(function, "runs_in_thread", False)


def calls_about(name: str, function: RewardFunction, problem: Problem, scored_G: Sequence[Any]) -> list[Call]:
    """Return the calls of a reward that waits: one for each completion with its grade, or one for the group."""
    in_thread = getattr(function, "runs_in_thread", False)
    completions_G, grades_G = ([getattr(each, key) for each in scored_G] for key in ("completion", "grade"))
    texts_G = [each.text for each in completions_G]
    if getattr(function, "compares_group", False):
        whole = partial(function, problem, completions_G, grades_G)
        return [Call(name, json.dumps([problem.id, *texts_G]), whole, in_thread)]
    return [
        Call(name, json.dumps([problem.id, text]), partial(function, problem, completion, grade), in_thread)
        for text, completion, grade in zip(texts_G, completions_G, grades_G, strict=True)
    ]


def values_of(
    name: str,
    function: RewardFunction,
    problem: Problem,
    scored_G: Sequence[Any],
    answers: Iterator[Any],
    *,
    deadline_s: float,
) -> Sequence[tuple[float, ...] | Failure]:
    """Return the values of a reward for each completion with its grade: one for every step, or one for the last step.

    A reward that waits has been called already, and its answers are next.
    """
    grades_G = [scored.grade for scored in scored_G]
    if is_slow(function):
        of_group = getattr(function, "compares_group", False)
        return worth(name, next(answers) if of_group else list(islice(answers, len(grades_G))), grades_G)
    if getattr(function, "judges_steps", False):
        texts_G = [[step.text for step in scored.steps] for scored in scored_G]
        values = ask(name, function, problem, texts_G, grades_G, deadline_s=deadline_s)
        return worth(name, values, grades_G, [len(texts) for texts in texts_G])
    completions_G = [scored.completion for scored in scored_G]
    return worth(name, ask(name, function, problem, completions_G, grades_G, deadline_s=deadline_s), grades_G)


class Answers:
    """Answers to calls, as JSON values, in memory and in a file to which each is added as soon as it is there."""

    def __init__(self, folder: Path | None = None, *, rank: int = 0) -> None:
        """Read what the processes of an earlier start have written to a folder; without one nothing is kept."""
        self._path = folder and folder / f"rank-{rank}.jsonl"
        self._known: dict[str, Any] = {row["call"]: row["value"] for row in _rows(folder)} if folder else {}
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, calls: Sequence[Call], limits: RewardCallsConfig) -> list[Any]:
        """Return the answer to each call, or a Failure."""
        names = [_name(call) for call in calls]
        missing = {name: call for name, call in zip(names, calls, strict=True) if name not in self._known}
        failed = asyncio.run(self._ask(missing, limits)) if missing else {}
        return [failed[name] if name in failed else self._known[name] for name in names]

    async def _ask(self, calls: dict[str, Call], limits: RewardCallsConfig) -> dict[str, Failure]:
        """Make calls, keep their answers, and return the failures."""
        free, ends = asyncio.Semaphore(limits.max_concurrency), time.monotonic() + limits.deadline_s
        tasks = {asyncio.ensure_future(_answered(call, limits, free)): name for name, call in calls.items()}
        failures: dict[str, Failure] = {}
        waiting = set(tasks)
        while waiting and (left := ends - time.monotonic()) > 0:
            done, waiting = await asyncio.wait(waiting, timeout=min(left, _REPORT_S), return_when="FIRST_COMPLETED")
            for task in done:
                self._keep(tasks[task], calls[tasks[task]].reward, task.result(), failures)
            if not done and time.monotonic() < ends:
                say("train_grpo", f"{len(tasks) - len(waiting):,} of {len(tasks):,} calls of rewards are answered")
        for task in waiting:
            task.cancel()
            reward = calls[tasks[task]].reward
            what = f"reward {reward} did not answer"
            failures[tasks[task]] = Failure(what, f"{what} within {limits.deadline_s:g} s, the time for a rollout")
        return failures

    def _keep(self, name: str, reward: str, answer: dict[str, Any] | Failure, failures: dict[str, Failure]) -> None:
        if isinstance(answer, Failure):
            failures[name] = answer
            return
        self._known[name] = answer["value"]
        if self._path:
            row = {"call": name, "reward": reward, **answer}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps(row)}")  # what a killed process has left of a line ends before it


def in_thread(call: Callable[[], _T]) -> "Future[_T]":
    """Return the future result of a call in a thread, which ends with the process."""
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()  # nobody can cancel it any more

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # whoever waits for the result must not wait forever
            failure: BaseException = error
            if not isinstance(error, Exception) or isinstance(error, CancelledError):  # they would end the waiting task
                failure = RuntimeError(f"it raised {type(error).__name__}: {error}".removesuffix(": "))
                failure.__cause__ = error
            result.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    return result


class Priced(float):
    """A value that took tokens of a server, as a reward that waits may return it."""

    def __new__(cls, value: float, prompt_tokens: int, completion_tokens: int) -> "Priced":
        """Return the value, with the tokens that it took."""
        made = super().__new__(cls, value)
        made.prompt_tokens, made.completion_tokens = prompt_tokens, completion_tokens
        return made

    prompt_tokens: int
    completion_tokens: int


def write_totals(answers: Path, path: Path, judge: "JudgeConfig | None") -> None:
    """Write and print what the answered calls of each reward took, of this start and of earlier ones."""
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in _rows(answers):
        total = totals[row["reward"]]
        total["calls"] += 1
        for key in ("seconds", "prompt_tokens", "completion_tokens"):
            total[key] += row[key]
    for reward, total in totals.items():
        line = f"reward {reward}: {total['calls']:,.0f} answers, {total['seconds'] / total['calls']:.2f} s each"
        if tokens := total["prompt_tokens"] + total["completion_tokens"]:
            line += f", {tokens:,.0f} tokens"
        if reward == "judge" and judge:
            prices = judge.prompt_price * total["prompt_tokens"], judge.completion_price * total["completion_tokens"]
            total["cost"] = sum(prices) / 1e6
            line += f", cost {total['cost']:,.2f}" if total["cost"] else ""
        say("train_grpo", line)
    if totals:
        jsonl.write_json(path, totals)


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the answers kept in a folder, without a line that was half written when its process was killed."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def _name(call: Call) -> str:
    return hashlib.sha256(f"{call.reward}\n{call.key}".encode()).hexdigest()


async def _answered(call: Call, limits: RewardCallsConfig, free: asyncio.Semaphore) -> dict[str, Any] | Failure:
    """Return the answer to a call with what it took, or a Failure after its last try."""
    pause_s = _FIRST_PAUSE_S
    for tries_left in reversed(range(limits.max_tries)):
        async with free:
            started = time.monotonic()
            try:
                # A thread of its own: a function that does not return must hold up nothing at the end.
                answer = asyncio.wrap_future(in_thread(call.ask)) if call.in_thread else call.ask()
                value = await asyncio.wait_for(answer, limits.timeout_s)
                tokens = {key: getattr(value, key, 0) for key in ("prompt_tokens", "completion_tokens")}
                return {"value": _plain(value), "seconds": time.monotonic() - started, **tokens}
            except _PASSING as error:
                last: Exception = error
                if isinstance(error, TimeoutError) and not str(error):
                    last = TimeoutError(f"no answer within {limits.timeout_s:g} s")
            except Exception as error:  # what people write may fail in any way
                return failure_of(call.reward, error)
        if tries_left:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return failure_of(call.reward, last)


def _plain(value: Any) -> Any:
    """Return numbers of any library as floats, alone or in a list."""
    if isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "shape", None) != ():
        return [_plain(each) for each in value]
    return float(value)
