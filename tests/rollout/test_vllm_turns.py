"""Trajectories through the interface of vLLM: with an engine of transformers, with fake servers, and with vLLM."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from components.environments.environment import Observation
from components.environments.pool import Answer, Environments
from components.policy import checkpoint as checkpoints
from components.policy.checkpoint import Checkpoint, ReadObservation
from components.rollout.sampler import Sampling
from components.rollout.vllm.config import VllmConfig
from components.rollout.vllm.servers import Request, VllmServers
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig
from tests.cluster.processes import wait_until
from tests.rollout import acting
from tests.rollout.acting import PROBLEMS, ActingEnvironments
from tests.rollout.fake_vllm import FakeVllm
from tests.rollout.vllm_policies import VLLM, Words, beside, sampler, servers_config
from tests.train_grpo.own_weights import OwnWeights

_VLLM_CONTEXT = acting.CONTEXT - 4
"""Less than the model's."""


@pytest.fixture
def own_weights(tmp_path: Path) -> OwnWeights:
    """An engine that stops at no text, and samples on to the last token that it may."""
    checkpoints.save(acting.checkpoint(acting.qwen3), tmp_path)
    engine = OwnWeights(acting.checkpoint(acting.qwen3), tmp_path)
    engine.versions.append(0)
    return engine


def test_trajectories_are_those_of_a_naive_reference(own_weights: OwnWeights) -> None:
    """What is sampled after a call, by an engine that does not notice it, is dropped."""
    chance, environments = random.Random(1), ActingEnvironments(delay_s=lambda: chance.choice([0.0, 0.01]))
    sampling = acting.sampling(environments)
    completions = acting.generate(sampler(own_weights, acting.checkpoint(acting.qwen3)), sampling)
    ends = acting.require_true(completions, acting.checkpoint(acting.qwen3), sampling)
    assert ends == {"failed", "done", "turns", "tokens", "context"}
    assert environments.open == 0
    assert len({each.tokens for each in completions}) > len(completions) / 2


class _Acting(Words):
    """A policy that acts: each of its turns ends with its end token."""

    read_observation = staticmethod(lambda text, ended: ReadObservation(tuple(text.encode()), text))


class _OneIsSlow:
    """Environments of which those of the first problem answer only after all others are done."""

    config = ToolsConfig(environment="feedback", max_turns=3)

    def __init__(self) -> None:
        self.done: list[Problem] = []
        self.threads = ThreadPoolExecutor(4)

    def begin(self, problem: Problem, past: Sequence[str] = ()) -> Any:
        turns, is_slow = itertools.count(len(past)), problem == PROBLEMS[0]

        def answer(text: str) -> Answer:
            if is_slow:
                wait_until(lambda: len(self.done) == 3 * (len(PROBLEMS) - 1))
            is_done = next(turns) == 2
            if is_done and not is_slow:
                self.done.append(problem)
            return Answer(Observation(f"no {text}", done=is_done))

        return SimpleNamespace(step=lambda text: self.threads.submit(answer, text), close=lambda: None)


def test_a_slow_environment_holds_up_no_other_trajectory(fakes: list[FakeVllm]) -> None:
    """Each goes on as soon as it is answered, with a request of all tokens so far for what is left to be sampled."""
    client = VllmServers([fake.url for fake in fakes], servers_config(request_deadline_s=10, lost_deadline_s=10))
    environments = cast(Environments, _OneIsSlow())
    sampling = Sampling(num_samples=3, temperature=0.7, max_new_tokens=9, seed=1, environments=environments)
    completions = acting.generate(sampler(client, cast(Checkpoint, _Acting())), sampling)
    observed = tuple(b"no [2]")
    for completion in completions:
        assert completion.tokens.completion_ids == (2, 1, *observed, 2, 1, *observed, 2, 1)
        assert completion.logprobs == (-0.5, -0.25) * 3
        assert [(turn.end, turn.observation) for turn in completion.turns] == [(2, "no [2]"), (4, "no [2]"), (6, "")]
        assert completion.finished
    bodies = [body for fake in fakes for body in fake.generated()]
    firsts = [body for body in bodies if body["sampling_params"]["n"] == 3]
    others = [body for body in bodies if body["sampling_params"]["n"] == 1]
    assert (len(firsts), len(others)) == (len(PROBLEMS), 2 * len(completions))
    assert Counter(body["sampling_params"]["max_tokens"] for body in others) == {7: 12, 5: 12}
    assert len({body["sampling_params"]["seed"] for body in bodies}) == len(bodies)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    """An engine that can stop at texts."""
    folder = tmp_path_factory.mktemp("vllm")
    checkpoints.save(acting.checkpoint(acting.qwen3), folder / "model")
    config = VllmConfig.model_validate({**VLLM, "max_tokens": _VLLM_CONTEXT, "start_deadline_s": 550})
    engine = beside(folder / "model", config, folder, has_tokenizer=True)
    yield engine
    engine.close()


@pytest.mark.slow
def test_trajectories_by_vllm_are_those_of_a_naive_reference(vllm: VllmServers) -> None:
    """While requests come and go, with calls that vLLM stops at by its tokenizer."""
    chance, environments = random.Random(1), ActingEnvironments(delay_s=lambda: chance.choice([0.0, 0.01, 0.1]))
    sampling, plain = acting.sampling(environments), acting.checkpoint(acting.qwen3)
    completions = acting.generate(sampler(vllm, acting.checkpoint(acting.qwen3)), sampling)
    assert acting.require_true(completions, plain, sampling, _VLLM_CONTEXT) >= {"failed", "done", "turns"}
    assert any(turn.text.endswith("\n```\n") for completion in completions for turn in completion.turns)
    assert len({each.tokens for each in completions}) > len(completions) / 2
    assert all(each.num_tokens for each in acting.generate(sampler(vllm, plain), acting.sampling()))


@pytest.mark.slow
def test_what_vllm_refuses_is_reported_and_ends_nothing(vllm: VllmServers) -> None:
    """A request that is refused fails alone; requests in flight at the end of the block are given up."""
    greedy = {"max_tokens": 3, "temperature": 0.0, "logprobs": 0}
    with vllm.submitting() as submit:
        answers = [submit(Request((6,) * length, greedy)) for length in (3, 100, 4)]
        assert [len(answers[number].result()[0].token_ids) for number in (0, 2)] == [3, 3]
        with pytest.raises(PipelineError, match=r"vLLM server .* refuses"):
            answers[1].result()
        given_up = submit(Request((6,), {"max_tokens": 50, "temperature": 1.0, "logprobs": 0, "n": 20}))
    assert given_up.done()
