"""The post-training graph and nothing else: problems in, a registered model out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp import dsl

from components.evaluate.component import evaluate
from components.preflight.config import resolved
from components.prepare_data.component import prepare_data
from components.register.component import register
from components.report.component import report
from components.train_grpo.component import train_grpo
from components.train_sft.component import train_sft
from components.validate_data.component import validate_data
from pipelines import resources

PARAMS = resolved(Path(__file__).parents[1] / "params.yaml")


def stages(config: Mapping[str, Any], **launch: Any) -> dict[str, dsl.PipelineTask]:
    """Return the task of each stage, by its name on the screen: one graph for a laptop and for a cluster.

    Args:
        config: The section of each stage, as `<stage>_config`.
        launch: What training takes beside its section on a cluster: where to run, and the run that it belongs to.
    """
    prepared = prepare_data(config=config["prepare_data_config"])
    problems = prepared.outputs["problems"]
    validated = validate_data(config=config["validate_data_config"], problems=problems)

    # All that follows needs a model from here, so nothing is trained or measured on data that were rejected.
    sft = train_sft(config=config["train_sft_config"], problems=problems, **launch).after(validated)
    reference = sft.outputs["reference"]
    grpo = train_grpo(config=config["train_grpo_config"], problems=problems, reference=reference, **launch)

    models = {"base": sft.outputs["base_model"], "sft": reference, "grpo": grpo.outputs["policy"]}
    scores = {
        name: evaluate(config=config["evaluate_config"], model=model, problems=problems).set_display_name(
            f"evaluate {name}"
        )
        for name, model in models.items()
    }
    reported = report(
        config=config["report_config"],
        sft_training=sft.outputs["training"],
        grpo_training=grpo.outputs["training"],
        validation=validated.outputs["validation"],
        **{f"{name}_evaluation": score.outputs["evaluation"] for name, score in scores.items()},
    )
    # Fails where the gate is missed: nothing is registered, and the run is red.
    registered = register(
        config=config["register_config"], policy=grpo.outputs["policy"], report=reported.outputs["report"]
    )
    return {
        "prepare_data": prepared,
        "validate_data": validated,
        "train_sft": sft,
        "train_grpo": grpo,
        **{f"evaluate {name}": score for name, score in scores.items()},
        "report": reported,
        "register": registered,
    }


@dsl.pipeline(name="grpo-post-training")
def grpo_post_training(
    prepare_data_config: dict[str, Any] = PARAMS["prepare_data"],
    validate_data_config: dict[str, Any] = PARAMS["validate_data"],
    train_sft_config: dict[str, Any] = PARAMS["train_sft"],
    train_grpo_config: dict[str, Any] = PARAMS["train_grpo"],
    evaluate_config: dict[str, Any] = PARAMS["evaluate"],
    report_config: dict[str, Any] = PARAMS["report"],
    register_config: dict[str, Any] = PARAMS["register"],
) -> None:
    """Fine-tune a base model, improve it with GRPO, and register it if it is measurably better.

    Each parameter is one section of the params file.
    """
    resources.on_one_machine(stages(dict(locals())))
