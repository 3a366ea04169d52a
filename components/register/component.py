"""register as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def register(
    config: dict[str, Any],
    grpo: dsl.Input[dsl.Model],
    report: dsl.Input[dsl.Artifact],
    registration: dsl.Output[dsl.Artifact],
) -> None:
    """Register the policy as a version, if the gate's verdict allows it.

    Args:
        config: The register section of the params file.
        grpo: What train_grpo made, with the policy.
        report: What report made, with the gate's verdict.
        registration: The version and its model card; whether a new version was registered.
    """
    from components.register.register import STAGE
    from components.shared.stage import run_task

    metrics = run_task(STAGE, config, registration.path, policy=f"{grpo.path}/policy", report=f"{report.path}/report")
    registration.metadata.update(metrics)
