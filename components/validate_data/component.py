"""validate_data as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def validate_data(
    config: dict[str, Any],
    data: dsl.Input[dsl.Dataset],
    validation: dsl.Output[dsl.Artifact],
    data_page: dsl.Output[dsl.HTML],
) -> None:
    """Check that the problems are fit for training and evaluation, and stop the pipeline if they are not.

    Args:
        config: The validate_data section of the params file.
        data: Output of prepare_data.
        validation: The outcome of every expectation, as JSON and as a page; numbers of rows and of unmet expectations.
        data_page: The page for Kubeflow's UI.
    """
    import shutil
    from pathlib import Path

    from components.shared.task import run_task
    from components.validate_data.validate import PAGE, STAGE

    result = run_task(STAGE, config, validation.path, problems=f"{data.path}/problems")
    validation.metadata.update(result.metrics)
    Path(data_page.path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(validation.path) / "validation" / PAGE, data_page.path)
