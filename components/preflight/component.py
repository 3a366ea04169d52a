"""preflight as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def preflight(  # noqa: PLR0917 - the run form
    base_model: str,
    cluster_gpu_type: str,
    cluster_gpus_per_node: int,
    cluster_nodes: int,
    cluster_queue: str,
    data_repository: str,
    data_revision: str,
    deployment: dict[str, Any],
    grpo_kl_coefficient: float,
    grpo_learning_rate: float,
    grpo_num_steps: int,
    overrides: str,
    preset: dict[str, Any],
    registry: str,
    skip_if_unchanged: bool,
    weights_storage: str,
    prepare_data_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    validate_data_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    train_sft_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    train_grpo_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    evaluate_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    report_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    register_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    cluster_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    unchanged: dsl.OutputPath(bool),  # type: ignore[valid-type]
    evaluate_memory: dsl.OutputPath(str),  # type: ignore[valid-type]
    evaluate_gpus: dsl.OutputPath(str),  # type: ignore[valid-type]
    evaluate_node_selector: dsl.OutputPath(dict),  # type: ignore[valid-type]
    evaluate_tolerations: dsl.OutputPath(list),  # type: ignore[valid-type]
    configuration: dsl.Output[dsl.HTML],
) -> None:
    """Check the run form and the cluster, name all that is wrong at once, and hand the sections on to the stages.

    The inputs are the parameters of the pipeline, where each is described, and what it was compiled with; the outputs
    are the sections that they mean, what the pods that evaluate ask for, and the configuration as a page.
    """
    inputs = dict(locals())  # first of all: what the task was called with, by name
    from components.preflight.preflight import run

    run(inputs)
