"""report as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def report(  # noqa: PLR0917 - a task has as many parameters as inputs and outputs
    config: dict[str, Any],
    base_evaluation: dsl.Input[dsl.Artifact],
    sft_evaluation: dsl.Input[dsl.Artifact],
    grpo_evaluation: dsl.Input[dsl.Artifact],
    sft_training: dsl.Input[dsl.Artifact],
    grpo_training: dsl.Input[dsl.Artifact],
    validation: dsl.Input[dsl.Artifact],
    report: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Compare base, SFT and GRPO and decide the promotion gate.

    Args:
        config: The report section of the params file.
        base_evaluation: Evaluation of the base model.
        sft_evaluation: Evaluation of the SFT model.
        grpo_evaluation: Evaluation of the GRPO policy.
        sft_training: Steps of supervised fine-tuning.
        grpo_training: Steps of GRPO.
        validation: Result of the validation of the data.
        report: The page, the verdict and the summary.
        page: The page again, where Kubeflow shows it.
        metrics: Accuracies, gain and verdict.
    """
    import shutil
    from pathlib import Path

    from components.report.report import STAGE
    from components.shared.stage import run_task

    values = run_task(
        STAGE,
        config,
        base_evaluation=base_evaluation.path,
        sft_evaluation=sft_evaluation.path,
        grpo_evaluation=grpo_evaluation.path,
        sft_training=sft_training.path,
        grpo_training=grpo_training.path,
        validation=validation.path,
        report=report.path,
    )
    Path(page.path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(report.path) / "report.html", page.path)
    for name, value in values.items():
        metrics.log_metric(name, value)
