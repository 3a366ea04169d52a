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
        validation: What validate_data made.
        sft: Folder of train_sft.
        grpo: Folder of train_grpo.
        evaluation: Folder of evaluate.
        report: The page, the verdict and the summary.
        report_page: The page, where Kubeflow shows it, with what the run took.
        metrics: Accuracies, gain and verdict, where Kubeflow compares runs.
        volume: Where the tasks of a run on a cluster have their shared volume; empty where they share everything.
        run_id: Of the run, whose folders on the volume are its own.
        run_name: Name of the run on Kubeflow's page, for its log.

    Returns:
        The folder with the outputs, as the tasks that follow read them.
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
