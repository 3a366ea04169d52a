"""clean_up as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def clean_up(
    run_id: str,
    overrides: dict[str, Any],
    status: dsl.PipelineTaskFinalStatus,
    summary: dsl.Output[dsl.Markdown],
) -> None:
    """Remove what is left of a run in the cluster, and summarise how it ended; runs last, whatever happened before.

    Args:
        run_id: Id of the run in Kubeflow, which is a label of every object of the run.
        overrides: The parameter of the pipeline, which has the namespace of training jobs.
        status: How the tasks before ended, from Kubeflow.
        summary: Each task with its outcome, its time and its last line; what was removed.
    """
    from components.clean_up.clean_up import Ending, run

    ending = Ending(run_id, status.state, status.error_message)
    run(ending, overrides.get("cluster", {}).get("namespace", ""), summary.path)
