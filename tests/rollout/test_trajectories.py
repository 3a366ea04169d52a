"""Completions of several turns: against a reference that computes every token from the whole sequence before it."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.environments.environment import Observation
from components.environments.pool import Answer
from components.policy.checkpoint import Checkpoint, create
from components.rollout.sampler import Completion, Sampling, StopTexts
from components.rollout.trajectory import RolloutContext, Status, Trajectory
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from tests import chat_model, tiny
from tests.chat_model import REASONING
from tests.rollout import acting
from tests.rollout.acting import QUESTIONS, ActingEnvironments, Naive
from tests.rollout.vllm_policies import Words


def _generate(checkpoint: Checkpoint, sampling: Sampling, max_batch_size: int = 64) -> list[Completion]:
    return acting.generate(TransformersSampler(checkpoint, max_batch_size), sampling)


def _references(make: Callable[[], PreTrainedModel], sampling: Sampling) -> list[Naive]:
    generator = torch.Generator().manual_seed(sampling.seed)
    shape = (len(QUESTIONS), sampling.num_samples, sampling.max_new_tokens)
    uniform_PGT = torch.rand(*shape, dtype=torch.float64, generator=generator)
    plain = acting.checkpoint(make)

    def run(problem: Problem, uniform_T: Tensor) -> Naive:
        return Naive.run(
            plain, problem, sampling, lambda place, share_V: int((share_V.cumsum(-1) <= uniform_T[place]).sum())
        )

    pairs = zip(acting.PROBLEMS, uniform_PGT, strict=True)
    return [run(problem, uniform_T) for problem, uniform_GT in pairs for uniform_T in uniform_GT]


@pytest.mark.parametrize(
    ("make", "max_new_tokens", "max_batch_size"),
    [(acting.gpt2, 27, 8), (acting.mistral, 22, 64), pytest.param(acting.qwen3_next, 22, 8, marks=pytest.mark.slow)],
    ids=["heads of their own", "grouped queries", "padded rows"],
)
def test_trajectories_are_those_of_a_naive_reference(
    make: Callable[[], PreTrainedModel], max_new_tokens: int, max_batch_size: int
) -> None:
    """Token for token: ends by the environment, its failure, the limits of turns, tokens and context."""
    environments = ActingEnvironments()
    sampling = acting.sampling(environments, max_new_tokens=max_new_tokens)
    completions, references = _generate(acting.checkpoint(make), sampling, max_batch_size), _references(make, sampling)
    for completion, reference in zip(completions, references, strict=True):
        reference.require(completion)
    assert {reference.end for reference in references} == {"failed", "done", "turns", "tokens", "context"}
    ends = [turn.text.endswith("\n```\n") for completion in completions for turn in completion.turns]
    assert {True, False} <= set(ends), "turns end with blocks and with end tokens"
    assert environments.open == 0


@pytest.mark.parametrize("make", [acting.mistral, acting.qwen3_next])
def test_a_prompt_that_fills_the_context_is_not_read(make: Callable[[], PreTrainedModel]) -> None:
    """Its completions are truncated and have no tokens; those of other prompts are sampled as without it."""
    sampler = TransformersSampler(acting.checkpoint(make), 64)
    problems, sampling = tiny.asked(["1+2", "1+2" * 40]), acting.sampling(ActingEnvironments())
    others, empty = sampler.generate(problems, sampling)
    assert [(each.num_tokens, each.truncated, each.turns) for each in empty] == [(0, True, ())] * 8
    assert others == sampler.generate(problems[:1], sampling)[0]


def test_every_token_is_read_once() -> None:
    """Each prompt goes through the model once, and so does each token of a trajectory that another one follows."""
    checkpoint, num_tokens = acting.checkpoint(), list[int]()
    checkpoint.model.get_input_embeddings().register_forward_hook(
        lambda _, given, out: num_tokens.append(given[0].numel())
    )
    completions = _generate(checkpoint, acting.sampling(ActingEnvironments()))
    prompts = sum(len(checkpoint.prompt_ids(question)) for question in QUESTIONS)
    assert sum(num_tokens) == prompts + sum(len(each.tokens.completion_ids) - 1 for each in completions)


def test_samples_do_not_depend_on_when_environments_answer() -> None:
    """To the bit, whether they answer at once or after any time: so a run can be repeated."""
    chance = random.Random(1)
    at_once = _generate(acting.checkpoint(), acting.sampling(ActingEnvironments()))
    delayed = _generate(
        acting.checkpoint(), acting.sampling(ActingEnvironments(delay_s=lambda: chance.choice([0.0, 0.001, 0.02])))
    )
    assert delayed == at_once


def test_each_turn_may_begin_inside_a_thought(tmp_path: Path) -> None:
    """A block in a thought calls nothing, and what a thought says is no answer: in later turns as in the first."""
    base = chat_model.write(tmp_path, REASONING)
    values = {"base": str(base), "chat": {}, "answer": "boxed", "tools": {"environment": "calculator"}}
    checkpoint = create(ModelConfig.model_validate(values), tiny.PROBLEMS, seed=1, dtype=torch.float32)
    environments = ActingEnvironments()
    rollout = RolloutContext(checkpoint, acting.sampling(environments, max_new_tokens=400))
    trajectory = Trajectory(rollout, tiny.PROBLEMS[0], checkpoint.prompt_ids("37*48?"))

    def write(text: str) -> None:
        ids = checkpoint.encode(text)
        trajectory.extend(ids, [0.0] * len(ids))

    write("Multiply.\n```calculator\n37*48\n```\n")
    assert trajectory.pending_answer is None
    write("</think>\n```calculator\n37*48\n```\n")
    assert trajectory.status is Status.WAITING
    trajectory.receive(Answer(Observation("1776")))
    write("It is \\boxed{1776}.<|endoftext|>")
    trajectory.receive(Answer(Observation(done=True)))
    same_message = trajectory.completion()
    assert [turn.in_thought for turn in same_message.turns] == [True, False]
    assert same_message.response == "It is \\boxed{1776}."


def test_a_stop_text_ends_a_trajectory_in_any_turn() -> None:
    """It has no more tokens, its last turn ends before the text, and its environment gives its rewards for it."""
    checkpoint = acting.checkpoint()
    free = _generate(checkpoint, acting.sampling(ActingEnvironments()))
    stopped = _generate(checkpoint, acting.sampling(ActingEnvironments(), stop=("12", "ab")))
    num_turns = set()
    for one, other in zip(free, stopped, strict=True):
        length = len(other.tokens.completion_ids)
        assert other.tokens.completion_ids == one.tokens.completion_ids[:length]
        if length < len(one.tokens.completion_ids):
            start = other.num_environment_tokens + (other.turns[-2].end if len(other.turns) > 1 else 0)
            last = checkpoint.decode(other.tokens.completion_ids[start:])
            assert other.turns[-1].text == last[: min(last.find(text) for text in ("12", "ab") if text in last)]
            assert other.text.endswith(other.turns[-1].text)
            assert other.failure or (other.finished and "past" in other.turns[-1].rewards)
            num_turns.add(len(other.turns))
    assert len(num_turns) > 1


class _Letters(Words):
    """A policy whose tokens are letters; its prompt opens a thought where it ends in a star."""

    format = SimpleNamespace(turn_stops=("\n```\n",), call_format="fenced", rewrites_history=False)
    opens_thought = staticmethod(lambda prompt_ids: prompt_ids[-1] == ord("*"))
    num_decoded = 0

    def decode(self, ids: Sequence[int]) -> str:  # type: ignore[override]
        self.num_decoded += len(ids)
        return "".join(map(chr, ids))


@pytest.mark.parametrize("stop", [(), ("end\n",)])
def test_sampling_a_token_costs_the_same_however_long_its_turn_is(stop: tuple[str, ...]) -> None:
    """Of a turn only the end is decoded, and only where one of the texts that stop it may end."""
    policy = _Letters()
    sampling = acting.sampling(ActingEnvironments(), max_new_tokens=20_000, stop=stop)
    trajectory = Trajectory(RolloutContext(cast(Checkpoint, policy), sampling), tiny.problem(1), (ord("?"),))
    trajectory.extend(tuple(map(ord, "a line\n" * 1000)), (-1.0,) * 7000)
    assert len(trajectory.ids) == 7000
    assert policy.num_decoded < 10 * 7000


def test_the_first_of_the_texts_that_stop_a_turn_is_found() -> None:
    """Whichever stands first in the list; also one of characters that take several tokens, as pictures do."""
    for texts in (["end", "stop"], ["stop", "end"]):
        assert StopTexts(texts, _Letters().decode).before("so stop here: end") == "so "
        assert StopTexts(texts, _Letters().decode).before("so end here: stop") == "so "
    assert StopTexts(["end"], _Letters().decode).before("so on") == "so on"
    text = "halt \N{OCTAGONAL SIGN}\N{OCTAGONAL SIGN}"
    stop = StopTexts([text[-2:]], lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    ids = list(f"{text} more".encode())
    assert next(place for place in range(1, len(ids) + 1) if stop.ends(ids[:place])) == len(text.encode())


_CALL = "```python\n1\n```\n"


@pytest.mark.parametrize(
    ("prompt", "written", "ends_at"),
    [
        ("?", f"So:\n{_CALL}more", f"So:\n{_CALL}"),
        ("?", f"<think>If\n{_CALL}then</think>\n{_CALL}more", f"<think>If\n{_CALL}then</think>\n{_CALL}"),
        ("*", f"If\n{_CALL}then</think>\n{_CALL}more", f"If\n{_CALL}then</think>\n{_CALL}"),
        ("*", f"If\n{_CALL}then", None),
        ("?", "```python\n1\n``` and so on", None),
    ],
)
def test_a_turn_ends_with_a_call_outside_of_thoughts(prompt: str, written: str, ends_at: str | None) -> None:
    """What a model tries out while it thinks is no call; sampled tokens beyond a call are dropped."""
    rollout = RolloutContext(cast(Checkpoint, _Letters()), acting.sampling(ActingEnvironments(), max_new_tokens=500))
    trajectory = Trajectory(rollout, tiny.problem(1), (ord(prompt),))
    trajectory.extend(tuple(map(ord, written)), (-1.0,) * len(written))
    assert trajectory.ids == list(map(ord, written if ends_at is None else ends_at))
    assert trajectory.status is (Status.SAMPLING if ends_at is None else Status.WAITING)
    trajectory.close()
