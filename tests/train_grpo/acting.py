"""Models that act in an environment."""

from pathlib import Path
from typing import Any

import torch

from components.policy.checkpoint import create, save
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig
from tests import tiny

CALCULATOR = ToolsConfig(environment="calculator", max_turns=3, max_observation_tokens=12, num_workers=2)


def problem(number: int, **changes: Any) -> Problem:
    """Return an addition that is worked by a call."""
    total = number + number % 7
    call = f"```calculator\n{number}+{number % 7}\n```\n```output\n{total}\n```\n"
    return tiny.problem(number, **{"solution": f"{call}#### {total}", **changes})


PROBLEMS = [problem(number) for number in range(8)]


def write_reference(folder: Path, tools: ToolsConfig | None, problems: list[Problem], *, steps: int) -> Path:
    """Save a tiny model that has learned something of the solutions, and samples others as well; return its folder."""
    model = ModelConfig.model_validate({**tiny.MODEL.model_dump(), "tools": tools and tools.model_dump()})
    checkpoint = create(model, problems, seed=1, dtype=torch.float32)
    engine = Policy(LogprobModel(checkpoint.model, temperature=1.0), tiny.engine_config(zero_stage=0))
    examples = checkpoint.examples(problems)
    num_tokens = sum(example.num_sampled for example in examples)
    for _ in range(steps):
        for batch in tiny.batches(examples, 2000):
            engine.backward(-engine(batch).logprobs_N.sum() / num_tokens)
        engine.step(1e-2)
    folder.mkdir(parents=True)
    save(checkpoint, folder)
    return folder
