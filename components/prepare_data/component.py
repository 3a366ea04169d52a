"""prepare_data as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def prepare_data(
    config: dict[str, Any],
    unchanged: bool,
    data: dsl.Output[dsl.Dataset],
) -> None:
    """Turn raw datasets into problems with a train and a test split that share nothing.

    Args:
        config: The prepare_data section of the params file.
        unchanged: Whether the run would only reproduce the newest registered version. Kubeflow then skips this task,
            and with it all that depend on it.
        data: `problems` of both splits, the manifest, and what was left out and why; their numbers.
    """
    from components.prepare_data.prepare import STAGE
    from components.shared.task import run_task

    data.metadata.update(run_task(STAGE, config, data.path).metrics)
