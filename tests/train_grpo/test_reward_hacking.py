"""Runs whose policy has learned to attack the grader: what it writes are the attacks that the grader is tested with.

That no attack is graded right is tested with the grader; here, that none pays.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch

from components.grading.verifier import Verifier
from components.policy.checkpoint import Checkpoint, create
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.answer_policy import AnswerPolicy
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from components.train_grpo.metrics import History
from components.train_grpo.trainer import Trainer
from components.train_grpo.worker import build_trainer
from tests import tiny
from tests.grading.tables import ATTACKS, Case
from tests.train_grpo.settings import grpo_config

GROUP_SIZE = 8
NUM_TOKENS = 24
"""Tokens of a response that are trained on; all of its text is graded."""
WRONG = [rf"2+2={number}, and so it is \boxed{{{number}}}" for number in (987654321, 123456789, 192837465)]
BARE = r"\boxed{987654321}"
UNREADABLE = Case(r"\frac{1}{", r"\boxed{\frac{1}{}", "unscorable", "no answer can be compared with this one")
Said = list[tuple[Problem, list[str]]]
"""Problems, and what the policy says to each of them."""


def _among(others: Sequence[str], attacks: Sequence[Case], *, right: bool = False) -> Said:
    """Groups of the attacks on one answer with `others`, or with right answers to fill them up."""
    said: Said = []
    for gold, same in groupby(sorted(attacks, key=lambda attack: attack.gold), key=lambda attack: attack.gold):
        responses = [attack.response for attack in same]
        size = GROUP_SIZE // 2 if right else GROUP_SIZE - len(others)
        for chunk in (responses[start : start + size] for start in range(0, len(responses), size)):
            filling = [rf"By adding up, it is \boxed{{{gold}}}"] if right else list(others)
            number = len(said)
            problem = tiny.problem(number, question=f"Question {number}?", answer=gold, solution=filling[0])
            said.append((problem, (chunk + filling * GROUP_SIZE)[:GROUP_SIZE]))
    return said


def _tokens(checkpoint: Checkpoint, question: str, response: str) -> TokenSequence:
    ids = checkpoint.encode(response)[:NUM_TOKENS]
    return TokenSequence(checkpoint.prompt_ids(question), (*ids, checkpoint.end_ids[0]))


def _trainer(said: Said, verify: Verifier, **changes: Any) -> Trainer:
    """A run with one pass over the problems in each two steps, of a policy that says what it is given to say."""
    problems = [problem for problem, _ in said]
    model = ModelConfig(base="scratch:math", prompt="{question}\n", answer=AnswerPolicy.DECLARED)
    checkpoint = create(model, problems, seed=1, dtype=torch.float32)
    responses = {problem.question: texts for problem, texts in said}

    def generate(questions: Sequence[str], sampling: Sampling) -> list[list[Completion]]:
        del sampling
        return [[_completion(question, text) for text in responses[question]] for question in questions]

    def _completion(question: str, text: str) -> Completion:
        tokens = _tokens(checkpoint, question, text)
        return Completion(tokens, (0.0,) * len(tokens.completion_ids), text, finished=True)

    settings = {
        "num_steps": 2,
        "prompts_per_step": len(said) // 2,
        "group_size": GROUP_SIZE,
        "logged_completions_per_step": 10_000,
        "reward__max_unscorable_fraction": 1.0,
        "sampler__max_mismatch": 1000.0,  # nothing was drawn, so there is nothing to compare with
        "engine__micro_batch_tokens": 4000,
        **changes,
    }
    sampler = TransformersSampler(checkpoint, 64)
    sampler.generate = generate  # type: ignore[method-assign]
    return build_trainer(grpo_config(**settings), checkpoint, problems, verify, sampler)


def _weights(trainer: Trainer) -> Iterator[torch.Tensor]:
    return (weight.detach().clone() for weight in trainer.checkpoint.model.parameters())


def _paid(history: History) -> list[tuple[str, str]]:
    """What was taken for right, and for which answer."""
    rewarded = (row for row in history.completions if row["rewards"]["accuracy"] not in ([0.0], [None]))
    return [(row["answer"], row["completion"]) for row in rewarded]


@pytest.mark.slow
def test_no_attack_earns_anything(verify: Verifier) -> None:
    """Among honest wrong answers all rewards are zero or missing, all advantages zero, and no weight moves."""
    trainer = _trainer(_among(WRONG, [*ATTACKS[::20], UNREADABLE]), verify)
    before = list(_weights(trainer))
    trainer.run(steps_done=0, after_step=lambda _: None)
    history = trainer.history
    assert not _paid(history)
    assert [(row["reward"], row["accuracy"]) for row in history.curves] == [(0.0, 0.0)] * 2
    assert any(row["verdict"] == "unscorable" for row in history.completions)
    assert all(row["advantage"] == 0.0 for row in history.completions)
    assert all(torch.equal(*pair) for pair in zip(before, _weights(trainer), strict=True))
    assert len(history.completions) > len(ATTACKS) / 20


@pytest.mark.slow
def test_an_attack_earns_no_more_than_its_format(verify: Verifier) -> None:
    """With a reward for the format as well, an attack gets what an honest wrong answer in that format gets."""
    trainer = _trainer(
        _among([WRONG[0], BARE], ATTACKS[1::40]), verify, reward__weights={"accuracy": 1.0, "format": 0.1}
    )
    trainer.run(steps_done=0, after_step=lambda _: None)
    history = trainer.history
    assert not _paid(history)
    assert all(row["reward_accuracy"] == 0.0 for row in history.curves)
    honest: dict[str, list[float]] = {row["id"]: [] for row in history.completions}
    for row in history.completions:
        assert row["reward"] in (None, pytest.approx(0.1 * row["rewards"]["format"][0]))
        if row["completion"] in (WRONG[0], BARE):
            honest[row["id"]].append(row["advantage"])
    assert all(row["advantage"] in (0.0, *honest[row["id"]]) for row in history.completions)
    assert all(low < high for high, low, *_ in honest.values())


@pytest.mark.slow
def test_beside_right_answers_attacks_are_unlearned(verify: Verifier) -> None:
    """Where half of a group is right, an attack has a negative advantage, and becomes less likely."""
    said = _among([], ATTACKS[2::60], right=True)
    trainer = _trainer(said, verify, num_steps=6, learning_rate=1e-3, loss__kl__coefficient=0.0)
    attacks, right = (
        [
            _tokens(trainer.checkpoint, problem.question, text)
            for problem, texts in said
            for text in texts
            if (problem.answer in text and text.startswith("By adding")) == honest
        ]
        for honest in (False, True)
    )
    before = [_logprob(trainer.checkpoint, sequences) for sequences in (attacks, right)]
    trainer.run(steps_done=0, after_step=lambda _: None)
    history = trainer.history
    after = [_logprob(trainer.checkpoint, sequences) for sequences in (attacks, right)]
    for row in history.completions:
        expected = {"right": 1, "wrong": -1, "unscorable": 0}[row["verdict"]]
        assert (row["advantage"] > 0) - (row["advantage"] < 0) == expected
        assert (row["verdict"] == "right") == row["completion"].startswith("By adding")
    assert after[0] < before[0] - 1
    assert after[1] > before[1] + 1


def _logprob(checkpoint: Checkpoint, sequences: Sequence[TokenSequence]) -> float:
    """The mean log-probability of a sequence."""
    num_tokens = sum(len(sequence.completion_ids) for sequence in sequences)
    scorer = LogprobModel(checkpoint.model, temperature=1.0)
    return float(completion_logprobs(scorer, tiny.batches(sequences, 4000), num_tokens).sum()) / len(sequences)
