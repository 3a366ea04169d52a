"""train_grpo as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import GPU


@dsl.component(base_image=GPU, install_kfp_package=False)
def train_grpo(  # noqa: PLR0917 - a task has as many parameters as inputs and outputs
    config: dict[str, Any],
    problems: dsl.Input[dsl.Dataset],
    reference: dsl.Input[dsl.Model],
    policy: dsl.Output[dsl.Model],
    training: dsl.Output[dsl.Artifact],
    timings: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    cluster: dict[str, Any] = {},  # noqa: B006 - Kubeflow has no value for null
    run_id: str = "",
) -> None:
    """Improve the reference model with Group Relative Policy Optimization.

    Args:
        config: The train_grpo section of the params file.
        problems: Problems from prepare_data.
        reference: The model from train_sft to start from and to stay close to.
        policy: The improved model.
        training: Reward, KL and the rest per step, with the completions they came from.
        timings: Seconds per phase of each step; the one output that differs between equal runs.
        metrics: Figures of the finished training.
        cluster: Where training runs as a job of its own (ClusterConfig); empty for here, in this task.
        run_id: Of the run that the job belongs to, as its label.
    """
    from components.cluster.task import run_task
    from components.train_grpo.train import STAGE

    values = run_task(
        STAGE,
        config,
        cluster=cluster,
        run_id=run_id,
        problems=problems.path,
        reference=reference.path,
        policy=policy.path,
        training=training.path,
        timings=timings.path,
    )
    for name, value in values.items():
        metrics.log_metric(name, value)
