"""validate_data as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def validate_data(
    config: dict[str, Any],
    problems: dsl.Input[dsl.Dataset],
    validation: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Check that the problems are fit to train and to evaluate on, and stop the pipeline where they are not.

    Args:
        config: The validate_data section of the params file.
        problems: The problems of both splits, as prepare_data writes them.
        validation: The outcome of every expectation, as JSON and as a page.
        page: The page again, where Kubeflow shows it; also there when the problems are rejected.
        metrics: Numbers of rows and of expectations that are not met.
    """
    import shutil
    from pathlib import Path

    from components.shared.stage import run_task
    from components.validate_data.validate import PAGE, STAGE

    try:
        values = run_task(STAGE, config, problems=problems.path, validation=validation.path)
    finally:
        written = Path(validation.path) / PAGE
        if written.is_file():
            Path(page.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(written, page.path)
    for name, value in values.items():
        metrics.log_metric(name, value)
