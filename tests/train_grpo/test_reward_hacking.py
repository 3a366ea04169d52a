"""A policy that has learned to attack the grader: what it writes are the attacks that the grader is tested with."""

from collections.abc import Sequence
from itertools import groupby

import pytest
import torch

from components.grading.verifier import Verifier
from components.policy.checkpoint import create
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.answer_policy import AnswerPolicy
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from components.train_grpo.worker import build_trainer
from tests import tiny
from tests.grading.tables import ATTACKS, Case
from tests.train_grpo.settings import grpo_config

GROUP_SIZE = 8
NUM_TOKENS = 24
"""Tokens of a response that are trained on; all of its text is graded."""
WRONG = [rf"2+2={number}, and so it is \boxed{{{number}}}" for number in (987654321, 123456789, 192837465)]
UNREADABLE = Case(r"\frac{1}{", r"\boxed{\frac{1}{}", "unscorable", "no answer can be compared with this one")


def _responses(attacks: Sequence[Case]) -> dict[str, tuple[Problem, list[str]]]:
    """Return problems by their question, each with attacks on its answer and honest wrong answers to fill the group."""
    responses: dict[str, tuple[Problem, list[str]]] = {}
    for gold, same in groupby(sorted(attacks, key=lambda attack: attack.gold), key=lambda attack: attack.gold):
        texts, size = [attack.response for attack in same], GROUP_SIZE - len(WRONG)
        for chunk in (texts[start : start + size] for start in range(0, len(texts), size)):
            number = len(responses)
            problem = tiny.problem(number, question=f"Question {number}?", answer=gold, solution=WRONG[0])
            responses[problem.question] = (problem, (chunk + WRONG * GROUP_SIZE)[:GROUP_SIZE])
    return responses


@pytest.mark.slow
def test_no_attack_earns_anything(verify: Verifier) -> None:
    """Among honest wrong answers all rewards are zero or missing, all advantages zero, and no weight moves."""
    responses = _responses([*ATTACKS[::20], UNREADABLE])
    problems = [problem for problem, _ in responses.values()]
    model = ModelConfig(base="scratch:math", prompt="{question}\n", answer=AnswerPolicy.DECLARED)
    checkpoint = create(model, problems, seed=1, dtype=torch.float32)

    def completion(question: str, text: str) -> Completion:
        ids = (*checkpoint.encode(text)[:NUM_TOKENS], checkpoint.end_ids[0])
        return Completion(TokenSequence(checkpoint.prompt_ids(question), ids), (0.0,) * len(ids), text, finished=True)

    def generate(problems: Sequence[Problem], sampling: Sampling) -> list[list[Completion]]:
        del sampling
        return [[completion(problem.question, text) for text in responses[problem.question][1]] for problem in problems]

    config = grpo_config(
        num_steps=2,
        prompts_per_step=len(problems) // 2,
        group_size=GROUP_SIZE,
        logged_completions_per_step=10_000,
        reward__max_unscorable_fraction=1.0,
        sampler__max_mismatch=1000.0,  # nothing was sampled, so there is nothing to compare with
        engine__micro_batch_tokens=4000,
    )
    sampler = TransformersSampler(checkpoint, 64)
    sampler.generate = generate  # type: ignore[assignment, method-assign]  # nothing is continued
    trainer = build_trainer(config, checkpoint, problems, verify, sampler)
    before = [weight.detach().clone() for weight in checkpoint.model.parameters()]
    trainer.run(steps_done=0, after_step=lambda _: None)
    rows = trainer.history.completions
    assert len(rows) > len(ATTACKS) / 20
    assert all(row["rewards"]["accuracy"] in ([0.0], [None]) for row in rows)
    assert any(row["verdict"] == "unscorable" for row in rows)
    assert all(row["advantage"] == 0.0 for row in rows)
    assert [(row["reward"], row["accuracy"]) for row in trainer.history.curves] == [(0.0, 0.0)] * 2
    assert all(torch.equal(*pair) for pair in zip(before, checkpoint.model.parameters(), strict=True))
