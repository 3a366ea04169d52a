"""train_sft as a Kubeflow component."""

from typing import Any, NamedTuple

from kfp import dsl

from components.shared.images import GPU


@dsl.component(base_image=GPU, install_kfp_package=False)
def train_sft(
    config: dict[str, Any],
    data: dsl.Input[dsl.Dataset],
    sft: dsl.Output[dsl.Model],
    cluster: dict[str, Any] = {},  # noqa: B006 - Kubeflow has no value for null
    run_id: str = "",
    run_name: str = "",
) -> NamedTuple("Outputs", [("folder", str), ("problems", str)]):  # type: ignore[valid-type]
    """Fine-tune the base model on the worked solutions.

    Args:
        config: The train_sft section of the params file.
        data: The output of prepare_data.
        sft: `base_model`, for comparison; `reference`, which GRPO starts from and stays close to; `training`, loss and
            learning rate per step. Its metadata are the final metrics.
        cluster: Settings of the job that trains (ClusterConfig); empty to train in this task.
        run_id: Id of the pipeline run, a label of the job.
        run_name: Name of the run on Kubeflow's page, for the log and the trackers.

    Returns:
        The folder of the outputs and that of the problems, for the tasks that follow.
    """
    from components.cluster.task import run_task
    from components.train_sft.train import STAGE

    problems = f"{data.path}/problems"
    result = run_task(STAGE, config, sft.path, cluster=cluster, run_id=run_id, run_name=run_name, problems=problems)
    sft.metadata.update(result.metrics)
    return result.folder, result.inputs["problems"]
