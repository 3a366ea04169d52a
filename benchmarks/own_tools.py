"""This project's GRPO trainer with an environment as a worker of tools.py.

As in own_step.py the trainer is the one that `train_grpo` builds. Its sampler ends each turn at the length that the
case gives it, and its environment (look.py), in a process of its own as any other, answers each turn but the last.
"""

from typing import ClassVar

from own_step import Case, Lengths, TakeTurns, problems, rewarding, settings
from worker import Channel, read_case

from components.environments.pool import Environments
from components.grading.verifier import Verifier
from components.policy.checkpoint import Checkpoint
from components.policy.training import prepare_process
from components.rollout import decoding, transformers_sampler
from components.shared.model import ChatConfig, ModelConfig
from components.shared.tools import ToolsConfig
from components.train_grpo.worker import build_trainer


class _Turns(Lengths):
    turn_tokens: ClassVar[int]

    def ends(self, number: int, place: int) -> bool:
        del number
        return place % self.turn_tokens == 0


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


def build(case: Case, channel: Channel, environments: Environments) -> TakeTurns:
    """Return the trainer of the case, ready to run."""
    prepare_process(1)
    policy = checkpoint(case)
    sampler = transformers_sampler.TransformersSampler(policy, len(case["lengths_B"]))
    trainer = build_trainer(settings(case), policy, problems(case), Verifier(), sampler, environments=environments)
    _Turns.end_id, _Turns.turn_tokens = case["end_id"], case["turn_tokens"]
    decoding.Decoding = _Turns  # type: ignore[misc]
    trainer.rollouts.score = rewarding(case, trainer.rollouts.score)
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
