"""register as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def register(  # noqa: PLR0917 - a task has as many parameters as inputs and outputs
    config: dict[str, Any],
    problems: str,
    sft: str,
    grpo: str,
    evaluation: str,
    report: str,
    registration: dsl.Output[dsl.Artifact],
    registration_page: dsl.Output[dsl.HTML],
    run_name: str = "",
) -> None:
    """Register the policy, with everything it was made from, as a version if the gate's verdict allows it.

    Args:
        config: The register section of the params file.
        problems: Folder of the problems.
        sft: Folder of train_sft, with the base model and the reference.
        grpo: Folder of train_grpo, with the policy.
        evaluation: Folder of evaluate.
        report: Folder of report, with the gate's verdict.
        registration: The version and its model card; whether a new version was registered.
        registration_page: The page for Kubeflow's UI: what was registered, where it is, and what it cost.
        run_name: Name of the run, for the registry.
    """
    from pathlib import Path

    from components.register.register import STAGE
    from components.register.registration_page import registration_page as render
    from components.shared.task import run_task

    result = run_task(
        STAGE,
        config,
        registration.path,
        run_name=run_name,
        policy=f"{grpo}/policy",
        reference=f"{sft}/reference",
        base_model=f"{sft}/base_model",
        problems=problems,
        evaluation=f"{evaluation}/evaluation",
        grpo_training=f"{grpo}/training",
        sft_training=f"{sft}/training",
        report=f"{report}/report",
    )
    registration.metadata.update(result.metrics)
    page = render(config, Path(registration.path) / "registration")
    Path(registration_page.path).parent.mkdir(parents=True, exist_ok=True)
    Path(registration_page.path).write_text(page, encoding="utf-8")
