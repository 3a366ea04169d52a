"""Measures the models of a run, or one that is of none: the stage as it is declared; the work is in worker.py."""

from pathlib import Path

from components.evaluate.config import EvaluateConfig
from components.shared.stage import Stage


def evaluate(config: EvaluateConfig, **folders: Path) -> dict[str, float]:
    """Let the base, SFT and GRPO models answer every test problem, greedily and by sampling, and score the answers."""
    # Here, as torch and the libraries around it set variables that are none of the environment of the run.
    from components.evaluate.worker import evaluate

    return evaluate(config, **folders)


def evaluate_model(config: EvaluateConfig, **folders: Path) -> dict[str, float]:
    """Let one model answer problems by a protocol, and score the answers."""
    from components.evaluate.worker import evaluate_model

    return evaluate_model(config, **folders)


STAGE = Stage(
    name="evaluate",
    function=evaluate,
    config=EvaluateConfig,
    inputs=("base_model", "reference", "policy", "problems"),
    outputs=("evaluation",),
    has_work=True,
)
MODEL_STAGE = Stage(
    name="evaluate",
    function=evaluate_model,
    config=EvaluateConfig,
    inputs=("model", "problems"),
    outputs=("evaluation",),
    has_work=True,
)
"""The same of one model, which need not be of a run."""
