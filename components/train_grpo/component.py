"""train_grpo as a Kubeflow component."""

from typing import Any, NamedTuple

from kfp import dsl

from components.shared.images import GPU


@dsl.component(base_image=GPU, install_kfp_package=False)
def train_grpo(
    config: dict[str, Any],
    problems: str,
    sft: str,
    grpo: dsl.Output[dsl.Model],
    cluster: dict[str, Any] = {},  # noqa: B006 - Kubeflow has no value for null
    run_id: str = "",
    run_name: str = "",
) -> NamedTuple("Outputs", [("folder", str)]):  # type: ignore[valid-type]
    """Improve the reference model with Group Relative Policy Optimization.

    Args:
        config: The train_grpo section of the params file.
        problems: Folder of the problems, from train_sft.
        sft: Folder of train_sft: the model to start from and to stay close to.
        grpo: `policy`, the improved model; `training`, metrics of each step and sampled completions; `timings`, seconds
            per phase of each step, which differ between equal runs. Its metadata are the final metrics.
        cluster: Settings of the job that trains (ClusterConfig); empty to train in this task.
        run_id: Id of the pipeline run, a label of the job.
        run_name: Name of the run on Kubeflow's page, for the log and the trackers.

    Returns:
        The folder with the outputs, as the tasks that follow read them.
    """
    from components.cluster.task import run_task
    from components.train_grpo.train import STAGE

    result = run_task(
        STAGE,
        config,
        grpo.path,
        cluster=cluster,
        run_id=run_id,
        run_name=run_name,
        problems=problems,
        reference=f"{sft}/reference",
    )
    grpo.metadata.update(result.metrics)
    return (result.folder,)
