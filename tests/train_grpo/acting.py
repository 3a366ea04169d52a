"""Models that act in an environment, and an environment in which things go wrong."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from components.environments.environment import Observation
from components.grading.verifier import Grade
from components.policy.checkpoint import Checkpoint, create, save
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel
from components.rollout.sampler import Completion
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig
from tests import tiny

CALCULATOR = ToolsConfig(environment="calculator", max_turns=3, max_observation_tokens=12, num_workers=2)
FLAKY = ToolsConfig(
    environment="tests.train_grpo.acting:Flaky", call_format="message", max_turns=3, timeout_s=0.5, num_workers=2
)


class Flaky:
    """Asks for another answer until one is given twice; a 7 ends the process, an 8 makes it hang, a 9 is an error."""

    def reset(self, problem: Problem) -> None:
        """Forget the answers."""
        self.last = ""

    def step(self, text: str) -> Observation:
        """Reward the length of an answer."""
        if "7" in text:
            os._exit(3)
        while "8" in text:
            time.sleep(1)
        if "9" in text:
            raise ValueError("nine")
        done, self.last = text == self.last, text
        return Observation("Sure?", done=done, rewards={"length": len(text) / 10})


def num_calls(problem: Problem, completion: Completion, grade: Grade) -> float:
    """A custom reward that looks at the turns."""
    return sum("calculator" in turn.text for turn in completion.turns)


def problem(number: int, **changes: Any) -> Problem:
    """Return an addition that is worked by a call."""
    total = number + number % 7
    call = f"```calculator\n{number}+{number % 7}\n```\n```output\n{total}\n```\n"
    return tiny.problem(number, **{"solution": f"{call}#### {total}", **changes})


PROBLEMS = [problem(number) for number in range(8)]
QUESTIONED = [
    tiny.problem(3, id=f"sums/train/{number}", solution=f"#### {answer}")
    for number, answer in enumerate([6] * 12 + [5, 7, 8, 9])
]
"""A model that is fitted to these gives an answer that goes wrong in `Flaky` now and then."""


def fitted(tools: ToolsConfig | None, problems: list[Problem], *, steps: int) -> Checkpoint:
    """Return a tiny model that has learned something of the solutions, and samples others as well."""
    model = ModelConfig.model_validate({**tiny.MODEL.model_dump(), "tools": tools and tools.model_dump()})
    checkpoint = create(model, problems, seed=1, dtype=torch.float32)
    engine = Policy(LogprobModel(checkpoint.model, temperature=1.0), tiny.engine_config())
    examples = checkpoint.examples(problems)
    num_tokens = sum(example.num_sampled for example in examples)
    for _ in range(steps):
        for batch in tiny.batches(examples, 2000):
            engine.backward(-engine(batch).logprobs_N.sum() / num_tokens)
        engine.step(1e-2)
    return checkpoint


def write_reference(folder: Path, tools: ToolsConfig | None, problems: list[Problem], *, steps: int) -> Path:
    """Save such a model; return its folder."""
    folder.mkdir(parents=True)
    save(fitted(tools, problems, steps=steps), folder)
    return folder
