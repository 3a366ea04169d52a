"""prepare_data as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def prepare_data(
    config: dict[str, Any],
    problems: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Turn raw datasets into problems with a train and a test split that share nothing.

    Args:
        config: The prepare_data section of the params file.
        problems: The problems of both splits, the manifest, and what was left out and why.
        metrics: Numbers of problems kept, removed as contaminated, and set aside as malformed.
    """
    from components.prepare_data.prepare import STAGE
    from components.shared.stage import run_task

    for name, value in run_task(STAGE, config, problems=problems.path).items():
        metrics.log_metric(name, value)
