"""A model small enough for any test, and problems for it."""

from collections.abc import Sequence
from typing import Any

import torch

from components.policy.checkpoint import Checkpoint, create
from components.policy.config import EngineConfig
from components.policy.packing import MicroBatch, TokenSequence, pack
from components.shared.answer_policy import AnswerPolicy
from components.shared.model import ModelConfig
from components.shared.problem import Problem, Split

MODEL = ModelConfig(base="scratch:tiny", prompt="{question}\n", answer=AnswerPolicy.DECLARED)

CHECKPOINT = {"every_steps": 1000, "keep_last": 1, "keep_best": False, "grace_s": 30}
"""Settings of what is kept of an unfinished run: nothing but its end."""


def problem(number: int, *, split: Split = Split.TRAIN, **changes: Any) -> Problem:
    """Return an addition with a worked solution; solutions of larger numbers are longer."""
    steps = "".join(f"{n}+1={n + 1}\n" for n in range(number % 5))
    fields = {
        "id": f"sums/{split}/{number:03d}",
        "source": "sums",
        "split": split,
        "question": f"Tom has {number} apples and gets {number % 7}. Total?",
        "solution": f"{steps}#### {number + number % 7}",
        "answer": str(number + number % 7),
        "subject": "total",
        "level": 1 + number % 3,
    }
    return Problem.model_validate({**fields, **changes})


PROBLEMS = [problem(number) for number in range(24)]


def asked(questions: Sequence[str]) -> list[Problem]:
    """Return problems with these questions."""
    return [problem(number, question=question) for number, question in enumerate(questions)]


def checkpoint(*, seed: int = 1, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Return an untrained tiny model with the tokenizer of `PROBLEMS`."""
    return create(MODEL, PROBLEMS, seed=seed, dtype=dtype)


def engine_config(**changes: Any) -> EngineConfig:
    """Return the settings of an engine; small micro-batches, so that there are several."""
    fields = {
        "num_processes": 1,
        "deadline_s": 60,
        "zero_stage": 2,
        "offload": "none",
        "lora": None,
        "precision": "fp32",
        "gradient_checkpointing": False,
        "micro_batch_tokens": 100,
        "weight_decay": 0.0,
        "max_gradient_norm": 1.0,
    }
    return EngineConfig.model_validate({**fields, **changes})


def batches(sequences: Sequence[TokenSequence], max_tokens: int, *, padded: bool = False) -> list[MicroBatch]:
    """Return micro-batches on the CPU."""
    return pack(sequences, max_tokens=max_tokens, device=torch.device("cpu"), padded=padded)
