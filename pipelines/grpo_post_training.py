"""The post-training graph and nothing else: problems in, a registered model out."""

from pathlib import Path
from typing import Any

from kfp import dsl

from components.evaluate.component import evaluate
from components.prepare_data.component import prepare_data
from components.register.component import register
from components.report.component import report
from components.train_grpo.component import train_grpo
from components.train_sft.component import train_sft
from components.validate_data.component import validate_data
from pipelines import resources
from pipelines.sections import sections

PARAMS = sections(Path(__file__).parents[1] / "params.yaml")


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
    prepared = prepare_data(config=prepare_data_config)
    problems = prepared.outputs["problems"]
    validated = validate_data(config=validate_data_config, problems=problems)

    # All that follows needs a model from here, so nothing is trained or measured on data that were rejected.
    sft = train_sft(config=train_sft_config, problems=problems).after(validated)
    grpo = train_grpo(config=train_grpo_config, problems=problems, reference=sft.outputs["reference"])

    base_scores = evaluate(config=evaluate_config, model=sft.outputs["base_model"], problems=problems)
    sft_scores = evaluate(config=evaluate_config, model=sft.outputs["reference"], problems=problems)
    grpo_scores = evaluate(config=evaluate_config, model=grpo.outputs["policy"], problems=problems)
    base_scores.set_display_name("evaluate base")
    sft_scores.set_display_name("evaluate sft")
    grpo_scores.set_display_name("evaluate grpo")

    reported = report(
        config=report_config,
        base_evaluation=base_scores.outputs["evaluation"],
        sft_evaluation=sft_scores.outputs["evaluation"],
        grpo_evaluation=grpo_scores.outputs["evaluation"],
        sft_training=sft.outputs["training"],
        grpo_training=grpo.outputs["training"],
        validation=validated.outputs["validation"],
    )
    registered = register(config=register_config, policy=grpo.outputs["policy"], report=reported.outputs["report"])

    for task in (prepared, validated, reported, registered):
        resources.light(task)
    for task in (sft, grpo, base_scores, sft_scores, grpo_scores):
        resources.gpu(task)
    # Cheap stages may be served from the cache; a run that trains, measures or registers really does so.
    for task in (sft, grpo, base_scores, sft_scores, grpo_scores, reported, registered):
        task.set_caching_options(False)
