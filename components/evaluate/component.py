"""evaluate as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import GPU


@dsl.component(base_image=GPU, install_kfp_package=False)
def evaluate(
    config: dict[str, Any],
    data: dsl.Input[dsl.Dataset],
    sft: dsl.Input[dsl.Model],
    grpo: dsl.Input[dsl.Model],
    evaluation: dsl.Output[dsl.Artifact],
) -> None:
    """Measure the base, SFT and GRPO models on the held-out problems.

    Args:
        config: The evaluate section of the params file.
        data: What prepare_data made.
        sft: What train_sft made.
        grpo: What train_grpo made.
        evaluation: For each model one record per problem and sample, and scores with confidence intervals; accuracies.
    """
    from components.evaluate.evaluate import STAGE
    from components.shared.stage import run_task

    metrics = run_task(
        STAGE,
        config,
        evaluation.path,
        base_model=f"{sft.path}/base_model",
        reference=f"{sft.path}/reference",
        policy=f"{grpo.path}/policy",
        problems=f"{data.path}/problems",
    )
    evaluation.metadata.update(metrics)
