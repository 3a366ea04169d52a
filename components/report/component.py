"""report as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def report(
    config: dict[str, Any],
    validation: dsl.Input[dsl.Artifact],
    sft: dsl.Input[dsl.Model],
    grpo: dsl.Input[dsl.Model],
    evaluation: dsl.Input[dsl.Artifact],
    report: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Compare base, SFT and GRPO and decide the promotion gate.

    Args:
        config: The report section of the params file.
        validation: What validate_data made.
        sft: What train_sft made.
        grpo: What train_grpo made.
        evaluation: What evaluate made.
        report: The page, the verdict and the summary.
        page: The page again, where Kubeflow shows it.
        metrics: Accuracies, gain and verdict, where Kubeflow compares runs.
    """
    import shutil
    from pathlib import Path

    from components.report.report import STAGE
    from components.shared.stage import run_task

    values = run_task(
        STAGE,
        config,
        report.path,
        evaluation=f"{evaluation.path}/evaluation",
        sft_training=f"{sft.path}/training",
        grpo_training=f"{grpo.path}/training",
        validation=f"{validation.path}/validation",
    )
    metrics.metadata.update(values)
    Path(page.path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(report.path) / "report" / "report.html", page.path)
