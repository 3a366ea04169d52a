"""evaluate as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import GPU


@dsl.component(base_image=GPU, install_kfp_package=False)
def evaluate(
    config: dict[str, Any],
    model: dsl.Input[dsl.Model],
    problems: dsl.Input[dsl.Dataset],
    evaluation: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Measure a model on the held-out problems.

    Args:
        config: The evaluate section of the params file.
        model: The model to measure.
        problems: Problems from prepare_data.
        evaluation: One record per problem and sample, and scores with confidence intervals.
        metrics: Accuracy per dataset.
    """
    from components.evaluate.evaluate import STAGE
    from components.shared.stage import run_task

    values = run_task(STAGE, config, model=model.path, problems=problems.path, evaluation=evaluation.path)
    for name, value in values.items():
        metrics.log_metric(name, value)
