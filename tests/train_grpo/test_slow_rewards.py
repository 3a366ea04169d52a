"""Rewards that wait: many calls at once, limits on each and on all, answers that are kept, and a judge."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from components.grading.verifier import Verdict
from components.shared import jsonl
from components.shared.errors import RetryableError
from components.train_grpo.custom_rewards import Failure
from components.train_grpo.judge import JudgeConfig, judge
from components.train_grpo.rewards import group_reward, threaded_reward
from components.train_grpo.scoring import Scorer
from components.train_grpo.slow_rewards import Answers, Call, RewardCallsConfig, write_totals
from tests import tiny
from tests.train_grpo.groups import completion, grade
from tests.train_grpo.settings import grpo_config

LIMITS = RewardCallsConfig(max_concurrency=64, timeout_s=30.0, max_tries=3, deadline_s=60.0)


def _call(key: str, ask: Callable[[], Any], *, in_thread: bool = False) -> Call:
    return Call("mine", key, ask, in_thread)


def test_as_many_calls_are_made_at_once_as_are_allowed() -> None:
    """Functions in threads and coroutines alike; the answers come in the order of the calls."""
    barrier, at_work, most = threading.Barrier(3, timeout=20), [0], [0]

    async def ask(number: int) -> float:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        await asyncio.sleep(0)
        at_work[0] -= 1
        return float(number)

    limits = RewardCallsConfig(max_concurrency=3, timeout_s=30.0, max_tries=1, deadline_s=60.0)
    waiting = [_call(str(number), lambda: barrier.wait() >= 0, in_thread=True) for number in range(3)]
    assert Answers().get(waiting, limits) == [1.0] * 3
    assert Answers().get([_call(str(n), partial(ask, n)) for n in range(10)], limits) == list(map(float, range(10)))
    assert most == [3]


def test_temporary_errors_are_retried_and_others_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason; a value that is no number fails as well."""
    monkeypatch.setattr("components.train_grpo.slow_rewards._FIRST_PAUSE_S", 0.0)
    tries: list[str] = []

    def call(name: str, *results: Any) -> Call:
        left = list(results)

        def ask() -> Any:
            tries.append(name)
            result = left.pop(0)
            if isinstance(result, Exception):
                raise result
            return result

        return _call(name, ask, in_thread=True)

    calls = [
        call("twice", ConnectionError("reset"), RetryableError("busy"), 0.5),
        call("lost", *[RetryableError("busy") for _ in range(3)]),
        call("wrong", KeyError("score")),
        call("text", "good"),
        call("cancelled", CancelledError("mine")),
    ]
    value, busy, wrong, text, over = Answers().get(calls, LIMITS)
    assert value == 0.5
    assert sorted(tries) == ["cancelled"] + ["lost"] * 3 + ["text"] + ["twice"] * 3 + ["wrong"]
    assert "busy" in busy.message
    assert wrong.kind == "reward mine raised KeyError"
    assert text.kind == "reward mine raised ValueError"
    assert "CancelledError: mine" in over.message


def test_a_judge_that_never_answers_costs_its_deadline_once() -> None:
    """All calls are given up together, those that wait for their turn as well."""
    limits = RewardCallsConfig(max_concurrency=2, timeout_s=60.0, max_tries=3, deadline_s=0.2)
    failures = Answers().get([_call(str(number), asyncio.Event().wait) for number in range(20)], limits)
    assert {each.message for each in failures} == {"reward mine did not answer within 0.2 s, the time for a rollout"}
    one = RewardCallsConfig(max_concurrency=2, timeout_s=0.05, max_tries=1, deadline_s=20.0)
    (late,) = Answers().get([_call("late", asyncio.Event().wait)], one)
    assert "no answer within 0.05 s" in late.message


def test_no_call_is_made_twice(tmp_path: Path) -> None:
    """Neither in a rollout, nor after a restart, of another process as well; half a line counts for nothing."""
    numbers = iter(range(100))

    async def ask() -> float:
        return float(next(numbers))

    first, other = Answers(tmp_path, rank=0), Answers(tmp_path, rank=1)
    assert first.get([_call("a", ask), _call("a", ask)], LIMITS) == [0.0, 0.0]
    assert first.get([_call("b", ask)], LIMITS) == [1.0]
    assert other.get([_call("c", ask)], LIMITS) == [2.0]
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    again = Answers(tmp_path, rank=0)
    assert again.get([_call("a", ask), _call("b", ask), _call("c", ask)], LIMITS) == [0.0, 3.0, 2.0]
    assert Answers(tmp_path).get([_call("b", ask)], LIMITS) == [3.0]


async def _half(problem: Any, response: Any, result: Any) -> float:
    if response.text == "lost":
        raise ValueError("no such thing")
    return float(response.text)


@threaded_reward
@group_reward
def _ranks(problem: Any, completions: Any, grades: Any) -> list[float]:
    ordered = sorted(each.text for each in completions)
    return [float(ordered.index(each.text)) for each in completions]


def test_rewards_that_wait_are_scored_with_the_others() -> None:
    """For two problems after one whose source has no such reward; a failure leaves its completion without any."""
    weights = {f"{__name__}:{name}": 1.0 for name in ("_half", "_ranks")}
    config = grpo_config(reward__weights={"accuracy": 1.0, **weights}, reward__by_source={"other": {"accuracy": 1.0}})
    texts_PG = [["0.125", "0.75"], ["0.5", "0.25"], ["lost", "1.0"]]
    completions_PG = [[completion(text=text) for text in texts] for texts in texts_PG]
    score = Scorer(config, tiny.checkpoint(), lambda *_: [grade(Verdict.RIGHT)] * 6)
    other = tiny.PROBLEMS[2].model_copy(update={"source": "other"})
    first, *groups = score([other, *tiny.PROBLEMS[:2]], completions_PG)
    assert [scored.rewards for scored in first.scored_G] == [{"accuracy": (1.0,)}] * 2
    half, ranks = weights
    assert [scored.rewards[half] for scored in groups[0].scored_G] == [(0.5,), (0.25,)]
    assert [scored.rewards[ranks] for scored in groups[0].scored_G] == [(1.0,), (0.0,)]
    lost, kept = groups[1].scored_G
    assert isinstance(lost.failure, Failure)
    assert "no such thing" in lost.failure.message
    assert kept.rewards[half] == (1.0,)


@contextmanager
def answering(answers: list[tuple[int, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a server that gives these answers in turn, and the requests that it gets."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"path": self.path, "key": self.headers["Authorization"], **body})
            status, content = answers.pop(0)
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()


def _rated(content: Any, **usage: int) -> tuple[int, Any]:
    text = content if isinstance(content, str) else json.dumps(content)
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage or None}


def _settings(url: str, **changes: Any) -> JudgeConfig:
    rubric = {"right": "It is right.", "short": "It is short."}
    return JudgeConfig.model_validate({"base_url": url, "model": "judge", "rubric": rubric, **changes})


def test_the_mean_of_the_ratings_is_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge sees question, answer, response and rubric, whatever they hold, and is asked for numbers alone."""
    monkeypatch.setenv("MY_KEY", "secret")
    problem = tiny.problem(3, question="Why {response}?")
    with answering([_rated({"right": 10, "short": 4})]) as (url, requests):
        settings = _settings(url, key_variable="MY_KEY")
        assert judge(problem, "Because {question}", settings, 5) == pytest.approx(0.7)
    (request,) = requests
    assert (request["path"], request["key"], request["model"]) == ("/v1/chat/completions", "Bearer secret", "judge")
    (message,) = request["messages"]
    for text in ("Why {response}?", "Because {question}", problem.answer, "- short: It is short."):
        assert text in message["content"]
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["right", "short"]


def test_a_judge_that_is_too_slow_is_left() -> None:
    """Its connection is closed, by which it may know that nobody waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(RetryableError, match="timed out"):
            judge(tiny.problem(3), "5", _settings(f"http://127.0.0.1:{server.getsockname()[1]}/v1"), 0.1)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(60)
            while connection.recv(4096):
                pass


def test_the_judge_is_a_reward() -> None:
    """By its name in the weights; thoughts are not shown to it."""
    texts = ["<think>psst</think>5", "6"]
    with answering([_rated({"right": 10, "short": 10}), _rated({"right": 10, "short": 10})]) as (url, requests):
        settings = _settings(url).model_dump()
        config = grpo_config(reward__weights={"accuracy": 1.0, "judge": 0.5}, reward__judge=settings)
        score = Scorer(config, tiny.checkpoint(), lambda *_: [grade(Verdict.RIGHT)] * 2)
        (group,) = score(tiny.PROBLEMS[:1], [[completion(text=text) for text in texts]])
    assert [scored.combined(config.reward.weights) for scored in group.scored_G] == [(1.5,), (1.5,)]
    assert "psst" not in json.dumps(requests)


def test_what_a_judge_has_cost_is_counted_over_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens as the server counts them; a text that was asked about before costs nothing."""
    full = {"right": 10, "short": 10}
    answers = [_rated(full, prompt_tokens=100, completion_tokens=7), _rated(full, prompt_tokens=50)]
    with answering(answers) as (url, requests):
        calls = [Call("judge", text, partial(judge, tiny.problem(3), text, _settings(url), 5), True) for text in "56"]
        assert Answers(tmp_path, rank=0).get(calls[:1], LIMITS) == [1.0]
        assert Answers(tmp_path, rank=1).get(calls, LIMITS) == [1.0, 1.0]
        settings = _settings(url, prompt_price=2000.0, completion_price=1e6)
    assert len(requests) == 2
    write_totals(tmp_path, tmp_path / "totals.json", settings)
    totals = jsonl.read_json(tmp_path / "totals.json")["judge"]
    assert totals.pop("seconds") > 0
    assert totals == {"calls": 2, "prompt_tokens": 150, "completion_tokens": 7, "cost": pytest.approx(7.3)}
    assert "reward judge: 2 answers, " in (line := capsys.readouterr().out)
    assert line.endswith(" s each, 157 tokens, cost 7.30\n")


@pytest.mark.parametrize(
    ("answer", "message", "passes"),
    [
        ((429, {}), "answers 429", True),
        ((404, {"error": "no such model"}), "no such model", False),
        (_rated({"right": 10}), "without ratings", False),
        (_rated({"right": 11, "short": 0}), "rates right 11", False),
    ],
)
def test_an_answer_without_a_rating_is_an_error(answer: Any, message: str, passes: bool) -> None:
    """One that may pass is told from one that will not."""
    with answering([answer]) as (url, _), pytest.raises(Exception, match=message) as error:
        judge(tiny.problem(3), "5", _settings(url), 5)
    assert isinstance(error.value, RetryableError) == passes
