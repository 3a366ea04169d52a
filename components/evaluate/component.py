"""evaluate as a Kubeflow component."""

from typing import Any, NamedTuple

from kfp import dsl

from components.shared.images import GPU


@dsl.component(base_image=GPU, install_kfp_package=False)
def evaluate(
    config: dict[str, Any],
    problems: str,
    sft: str,
    grpo: str,
    evaluation: dsl.Output[dsl.Artifact],
    volume: str = "",
    run_id: str = "",
    run_name: str = "",
) -> NamedTuple("Outputs", [("folder", str)]):  # type: ignore[valid-type]
    """Measure the base, SFT and GRPO models on the held-out problems.

    Args:
        config: The evaluate section of the params file.
        problems: Folder of the problems, from train_sft.
        sft: Folder of train_sft.
        grpo: Folder of train_grpo.
        evaluation: For each model one record per problem and sample, and scores with confidence intervals; accuracies.
        volume: Mount point of the volume that the tasks of a run on a cluster share; empty on one machine.
        run_id: ID of the run, which names its folder on the volume.
        run_name: Name of the run on Kubeflow's page, for its log.

    Returns:
        The folder with the outputs, as the tasks that follow read them.
    """
    from components.evaluate.evaluate import STAGE
    from components.shared.task import run_task

    result = run_task(
        STAGE,
        config,
        evaluation.path,
        volume=volume,
        run_id=run_id,
        run_name=run_name,
        base_model=f"{sft}/base_model",
        reference=f"{sft}/reference",
        policy=f"{grpo}/policy",
        problems=problems,
    )
    evaluation.metadata.update(result.metrics)
    return (result.folder,)
