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
    """Remove what a run has left in the cluster, and say what became of it; runs last, whatever happened before.

    Args:
        run_id: Kubeflow's id of the run, which is a label of all that the run made.
        overrides: The parameter of the pipeline, for the namespace of training jobs.
        status: How the tasks before ended, from Kubeflow.
        summary: Each task with its outcome, its time and its last words; what was removed.
    """
    from components.clean_up.clean_up import Ending, run

    ending = Ending(run_id, status.state, status.error_message)
    run(ending, overrides.get("cluster", {}).get("namespace", ""), summary.path)
