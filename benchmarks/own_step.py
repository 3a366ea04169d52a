"""This project's GRPO trainer as a worker of grpo_step.py.

The trainer is the one that `train_grpo` builds and runs its own loop: it asks for the problems of its next step, and
there takes its turns. Two of its parts are replaced: the sampler ends each completion at the length that the case
gives it, and the rewards are the case's.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from worker import Channel, Step, peak_bytes, read_case, synchronize

from components.grading.verifier import Verifier
from components.policy.checkpoint import Checkpoint
from components.policy.training import prepare_process
from components.rollout import decoding, transformers_sampler
from components.rollout.sampler import Completion
from components.shared.answer_policy import AnswerPolicy
from components.shared.model import ModelConfig
from components.shared.problem import Problem, Split
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.prompts import Prompts
from components.train_grpo.rollouts import Score
from components.train_grpo.scoring import Group
from components.train_grpo.trainer import Trainer
from components.train_grpo.worker import build_trainer

Case = dict[str, Any]

_REWARD = {
    "weights": {"accuracy": 1.0},
    "supervision": "outcome",
    "max_unscorable_fraction": 1.0,
    "overlong_buffer_tokens": 0,
    "model": None,
}


@dataclass
class TakeTurns:
    """The problems of each step; handing them out begins a step, and ends the one before."""

    prompts: Prompts
    trainer: Trainer
    channel: Channel
    started: float | None = None

    def next_batch(self, count: int) -> list[Problem]:
        """Answer the request before, wait for the next one, and return the next problems."""
        self.answer()
        if not self.channel.wanted():
            raise SystemExit
        self.started = time.perf_counter()
        return self.prompts.next_batch(count)

    def record(self, problem_id: str, *, num_right: int, num_scored: int) -> None:
        """See `Prompts`."""
        self.prompts.record(problem_id, num_right=num_right, num_scored=num_scored)

    def state(self) -> Mapping[str, Any]:
        """See `Prompts`."""
        return self.prompts.state()

    def answer(self) -> None:
        """Say how long the step took that has just ended, if there was one."""
        if self.started is None:
            return
        synchronize()
        seconds = time.perf_counter() - self.started
        sampling_s = self.trainer.history.timings[-1]["sampling_s"]
        self.channel.done(Step(seconds, sampling_s, Lengths.sampled, peak_bytes()))


class Lengths(decoding.Decoding):
    """Ends each turn at its length, and at no token before it; log-probabilities are the model's."""

    end_id: ClassVar[int]
    lengths_B: ClassVar[Sequence[int]]
    sampled: ClassVar[list[int]]

    def ends(self, number: int, place: int) -> bool:
        """Return whether the token of this number of a completion of the batch is the last of its turn."""
        return place == self.lengths_B[number]

    def _sample_next(self, numbers: Sequence[int], logits_RV: Tensor, uniform_RT: Tensor) -> None:
        self._ends_R = torch.tensor(
            [self.ends(number, self._trajectories[number].num_sampled + 1) for number in numbers]
        )
        super()._sample_next(numbers, logits_RV, uniform_RT)

    def _sample(self, logits_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
        token_R, logprob_R = super()._sample(logits_RV, uniform_R)
        ends_R = self._ends_R.to(token_R.device)
        other_R = ends_R | (token_R == self.end_id)
        token_R[other_R] = torch.where(ends_R[other_R], self.end_id, self.end_id + 1)
        # On CPUs the logits have become probabilities in their own memory.
        probability_XV = logits_RV[other_R].softmax(-1) if logits_RV.is_cuda else logits_RV[other_R]
        logprob_R[other_R] = probability_XV.gather(1, token_R[other_R, None]).squeeze(1).log()
        return token_R, logprob_R


def settings(case: Case) -> TrainGRPOConfig:
    """Return the settings under which the trainer does what TRL's does."""
    bf16 = case["dtype"] == "bfloat16"
    return TrainGRPOConfig.model_validate(
        {
            "seed": 1,
            "num_iterations": 1,
            "num_steps": len(case["prompts"]),
            "prompts_per_step": len(case["prompts"][0]),
            "group_size": case["group_size"],
            "minibatches_per_rollout": 1,
            "updates_per_rollout": 1,
            "learning_rate": case["learning_rate"],
            "warmup_steps": 0,
            "final_learning_rate_fraction": 1.0,
            "logged_completions_per_step": 0,
            "prompts": {"source_weights": {}, "max_resampling_rounds": 0},
            "sampling": {
                "temperature": 1.0,
                "max_new_tokens": max(case["lengths_B"]),
                "max_batch_size": len(case["lengths_B"]),
                "truncated": "score",
            },
            "reward": _REWARD,
            "advantage": {"estimator": "z_score"},
            "loss": {
                "aggregation": "token_mean",
                "ratio": "token",
                "clip": {"low": 0.2, "high": 0.2},
                "kl": {"coefficient": case["kl_coefficient"], "estimator": "k3_corrected"},
            },
            "sampler": {"max_staleness": 0, "correction": {}, "max_mismatch": 0.1 if bf16 else 1e-3},
            "reference": "replicated",
            "checkpoint": {"every_steps": 1_000_000, "keep_last": 1, "keep_best": False, "grace_s": 10},
            "engine": {
                "num_processes": 1,
                "deadline_s": 600,
                "offload": "none",
                "zero_stage": 2,
                "precision": "bf16" if bf16 else "fp32",
                "gradient_checkpointing": False,
                "micro_batch_tokens": case["micro_batch_tokens"],
                "weight_decay": 0.0,
                "max_gradient_norm": 1.0,
            },
        }
    )


def checkpoint(case: Case) -> Checkpoint:
    """Return the case's model; read here, as AutoTokenizer puts Qwen2's own splitting rules in place of those saved."""
    # Not at the top: before the project's own imports, transformers imports more than they let it.
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=getattr(torch, case["dtype"])).to(case["device"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(case["model"])
    return Checkpoint(
        model, tokenizer, ModelConfig(base=case["model"], prompt="{question}", answer=AnswerPolicy.DECLARED)
    )


def problems(case: Case) -> list[Problem]:
    """Return a problem for each prompt of each step."""
    prompts = [prompt for prompts in case["prompts"] for prompt in prompts]
    fixed = {"source": "case", "split": Split.TRAIN, "solution": "", "answer": "1", "subject": "", "level": None}
    return [Problem(id=f"{number:04d}", question=prompt, **fixed) for number, prompt in enumerate(prompts)]


def rewarding(case: Case, score: Score) -> Score:
    """Return the trainer's own scoring with the case's rewards in place of what it finds; record the lengths, too."""
    waiting: list[float] = []

    def rewarded(problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]) -> list[Group]:
        Lengths.sampled = sorted(len(each.tokens.completion_ids) for group in completions_PG for each in group)
        waiting.extend(case["rewards_B"])
        groups = score(problems_P, completions_PG)
        for scored in (scored for group in groups for scored in group.scored_G):
            scored.rewards = {"accuracy": (waiting.pop(0),)}
        return groups

    return rewarded


def build(case: Case, channel: Channel) -> TakeTurns:
    """Return the trainer of the case, ready to run."""
    prepare_process(1)
    policy = checkpoint(case)
    sampler = transformers_sampler.TransformersSampler(policy, len(case["lengths_B"]))
    trainer = build_trainer(settings(case), policy, problems(case), Verifier(), sampler)
    Lengths.end_id, Lengths.lengths_B = case["end_id"], case["lengths_B"]
    decoding.Decoding = Lengths  # type: ignore[misc]
    trainer.rollouts.score = rewarding(case, trainer.rollouts.score)
    turns = TakeTurns(trainer.rollouts.prompts, trainer, channel)
    trainer.rollouts.prompts = turns  # type: ignore[assignment]
    return turns


if __name__ == "__main__":
    channel = Channel()
    turns = build(read_case(), channel)
    channel.ready()
    turns.trainer.run(steps_done=0, after_step=lambda _: None)
    turns.answer()
