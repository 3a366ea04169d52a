"""Declaration of the stage that evaluates the models of a run, or a single model; the work is in worker.py."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from components.evaluate.config import EvaluateConfig
from components.shared import jsonl
from components.shared.images import GPU
from components.shared.lineage import Material
from components.shared.stage import Stage
from components.shared.tools import ToolsConfig, environment_materials


def evaluate(config: EvaluateConfig, **folders: Path) -> dict[str, float]:
    """Let the base, SFT and GRPO models answer every test problem, greedily and by sampling, and score the answers."""
    # Imported here: torch and its libraries set environment variables, and the stage has recorded the user's by now.
    from components.evaluate import worker

    return worker.evaluate(config, **folders)


def evaluate_model(config: EvaluateConfig, **folders: Path) -> dict[str, float]:
    """Let one model answer problems by a protocol, and score the answers."""
    from components.evaluate import worker

    return worker.evaluate_model(config, **folders)


def _environment_files(config: EvaluateConfig, outputs: Mapping[str, Path]) -> dict[str, Material]:
    """Return the files of the environment in which the models answered. scores.json names it; the config may not."""
    scores = next(outputs["evaluation"].rglob("scores.json"))  # of any model: all answer in the same environment
    tools = jsonl.read_json(scores)["protocol"]["tools"]
    return environment_materials(ToolsConfig.model_validate(tools) if tools else None)


STAGE = Stage(
    name="evaluate",
    function=evaluate,
    config=EvaluateConfig,
    inputs={
        "base_model": "train_sft/base_model",
        "reference": "train_sft/reference",
        "policy": "train_grpo/policy",
        "problems": "prepare_data/problems",
    },
    outputs=("evaluation",),
    image=GPU,
    has_work=True,
    sources=lambda config: environment_materials(config.tools),
    materials=_environment_files,
)
MODEL_STAGE = replace(
    STAGE, function=evaluate_model, inputs={"model": "train_grpo/policy", "problems": "prepare_data/problems"}
)
"""The same stage for a single model, from a run or not."""
