"""train_sft as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import GPU


@dsl.component(base_image=GPU, install_kfp_package=False)
def train_sft(
    config: dict[str, Any],
    problems: dsl.Input[dsl.Dataset],
    base_model: dsl.Output[dsl.Model],
    reference: dsl.Output[dsl.Model],
    training: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    cluster: dict[str, Any] = {},  # noqa: B006 - Kubeflow has no value for null
    run_id: str = "",
) -> None:
    """Fine-tune the base model on the worked solutions.

    Args:
        config: The train_sft section of the params file.
        problems: Problems from prepare_data.
        base_model: The model that training started from, for comparison.
        reference: The fine-tuned model, which GRPO starts from and stays close to.
        training: Loss and learning rate per step.
        metrics: Figures of the finished training.
        cluster: Where training runs as a job of its own (ClusterConfig); empty for here, in this task.
        run_id: Of the run that the job belongs to, as its label.
    """
    from components.cluster.task import run_task
    from components.train_sft.train import STAGE

    values = run_task(
        STAGE,
        config,
        cluster=cluster,
        run_id=run_id,
        problems=problems.path,
        base_model=base_model.path,
        reference=reference.path,
        training=training.path,
    )
    for name, value in values.items():
        metrics.log_metric(name, value)
