"""report as a Kubeflow component."""

from typing import Any, NamedTuple

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def report(  # noqa: PLR0917 - a task has as many parameters as inputs and outputs
    config: dict[str, Any],
    validation: dsl.Input[dsl.Artifact],
    sft: str,
    grpo: str,
    evaluation: str,
    report: dsl.Output[dsl.Artifact],
    report_page: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    volume: str = "",
    run_id: str = "",
    run_name: str = "",
) -> NamedTuple("Outputs", [("folder", str)]):  # type: ignore[valid-type]
    """Compare base, SFT and GRPO and decide the promotion gate.

    Args:
        config: The report section of the params file.
        validation: Output of validate_data.
        sft: Folder of train_sft.
        grpo: Folder of train_grpo.
        evaluation: Folder of evaluate.
        report: The page, the verdict and the summary.
        report_page: The page for Kubeflow's UI, with the cost of the run.
        metrics: Accuracies, gain and verdict, for Kubeflow's comparison of runs.
        volume: Mount point of the volume that the tasks of a run on a cluster share; empty on one machine.
        run_id: ID of the run, which names its folder on the volume.
        run_name: Name of the run on Kubeflow's page, for its log.

    Returns:
        The folder with the outputs, for the tasks that follow.
    """
    from pathlib import Path

    from components.report.report import STAGE, page_of_run
    from components.shared.task import run_task

    folders = {
        "evaluation": f"{evaluation}/evaluation",
        "sft_training": f"{sft}/training",
        "grpo_training": f"{grpo}/training",
        "validation": f"{validation.path}/validation",
    }
    result = run_task(STAGE, config, report.path, volume=volume, run_id=run_id, run_name=run_name, **folders)
    metrics.metadata.update(result.metrics)
    page = page_of_run(config, folders, Path(report.path) / "report", timings=Path(grpo) / "timings")
    Path(report_page.path).parent.mkdir(parents=True, exist_ok=True)
    Path(report_page.path).write_text(page, encoding="utf-8")
    return (result.folder,)
