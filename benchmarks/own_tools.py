"""This project's GRPO trainer with an environment as a worker of tools.py.

As in own_step.py the trainer is the one that `train_grpo` builds. Its sampler ends each turn at the length that the
case gives it, and its environment (look.py), in a process of its own as any other, answers each turn but the last.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from own_step import Case, Lengths, TakeTurns, problems, rewarding, settings
from torch import Tensor
from worker import Channel, read_case

from components.environments.pool import Environments
from components.grading.verifier import Verifier
from components.policy.checkpoint import Checkpoint
from components.policy.training import prepare_process
from components.rollout import transformers_sampler
from components.rollout.sampler import Completion
from components.rollout.turn_decoding import TurnDecoding
from components.shared.model import ChatConfig, ModelConfig
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig
from components.train_grpo.rollouts import Score
from components.train_grpo.scoring import Group
from components.train_grpo.worker import build_trainer


class _Turns(TurnDecoding):
    """Ends each turn at its length, and at no token before it; log-probabilities are the model's."""

    end_id: ClassVar[int]
    turn_tokens: ClassVar[int]

    def _sample_next(self, numbers: Sequence[int], logits_RV: Tensor, uniform_RT: Tensor) -> None:
        places = [self._active[number].num_sampled + 1 for number in numbers]
        self._ends_R = torch.tensor([place % self.turn_tokens == 0 for place in places])
        super()._sample_next(numbers, logits_RV, uniform_RT)

    def _sample(self, logits_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
        token_R, logprob_R = super()._sample(logits_RV, uniform_R)
        other_R = self._ends_R | (token_R == self.end_id)
        token_R[other_R] = torch.where(self._ends_R[other_R], self.end_id, self.end_id + 1)
        # On CPUs the logits have become probabilities in their own memory.
        probability_XV = logits_RV[other_R].softmax(-1) if logits_RV.is_cuda else logits_RV[other_R]
        logprob_R[other_R] = probability_XV.gather(1, token_R[other_R, None]).squeeze(1).log()
        return token_R, logprob_R


def tools_of(case: Case) -> ToolsConfig:
    """Return how the case's model acts in its environment."""
    return ToolsConfig(
        environment="benchmarks.look:Look",
        arguments={"text": case["observation"], "num_turns": case["num_turns"]},
        call_format="message",
        max_turns=case["num_turns"],
        max_observation_tokens=len(case["observation"].split()) + 3,
        num_workers=1,
    )


def checkpoint(case: Case) -> Checkpoint:
    """Return the case's model with its environment; read as in own_step.py."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(case["model"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(case["model"])
    config = ModelConfig(base=case["model"], prompt="{question}", chat=ChatConfig(), tools=tools_of(case))
    return Checkpoint(model, tokenizer, config)


def measuring(score: Score) -> Score:
    """Return a scoring that also records the tokens of each trajectory, those of its environment included."""

    def measured(problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]) -> list[Group]:
        Lengths.sampled = sorted(len(each.tokens.completion_ids) for group in completions_PG for each in group)
        return score(problems_P, completions_PG)

    return measured


def build(case: Case, channel: Channel, environments: Environments) -> TakeTurns:
    """Return the trainer of the case, ready to run."""
    prepare_process(1)
    policy = checkpoint(case)
    sampler = transformers_sampler.TransformersSampler(policy, len(case["lengths_B"]))
    trainer = build_trainer(settings(case), policy, problems(case), Verifier(), sampler, environments=environments)
    _Turns.end_id, _Turns.turn_tokens = case["end_id"], case["turn_tokens"]
    transformers_sampler.TurnDecoding = _Turns  # type: ignore[misc]
    trainer.rollouts.score = measuring(rewarding(case, trainer.rollouts.score))
    turns = TakeTurns(trainer.rollouts.prompts, trainer, channel)
    trainer.rollouts.prompts = turns  # type: ignore[assignment]
    return turns


if __name__ == "__main__":
    channel, case = Channel(), read_case()
    with Environments(tools_of(case)) as environments:
        turns = build(case, channel, environments)
        channel.ready()
        turns.trainer.run(steps_done=0, after_step=lambda _: None)
        turns.answer()
