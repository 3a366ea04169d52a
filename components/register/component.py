"""register as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def register(
    config: dict[str, Any],
    policy: dsl.Input[dsl.Model],
    report: dsl.Input[dsl.Artifact],
    registration: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Register the policy as a version, if the gate's verdict allows it.

    Args:
        config: The register section of the params file.
        policy: The policy that GRPO trained.
        report: The report with the gate's verdict.
        registration: The version and its model card.
        metrics: Whether a new version was registered.
    """
    from components.register.register import STAGE
    from components.shared.stage import run_task

    values = run_task(STAGE, config, policy=policy.path, report=report.path, registration=registration.path)
    for name, value in values.items():
        metrics.log_metric(name, value)
