"""preflight as a Kubeflow component."""

from typing import Any

from kfp import dsl

from components.shared.images import LIGHT


@dsl.component(base_image=LIGHT, install_kfp_package=False)
def preflight(  # noqa: PLR0917 - the run form
    base_model: str,
    cluster_gpu_product: str,
    cluster_gpus_per_node: int,
    cluster_node_selector: dict[str, Any],
    cluster_num_nodes: int,
    cluster_queue: str,
    cluster_tolerations: list[Any],
    cluster_volume_claim: str,
    data_repository: str,
    data_revision: str,
    grpo_group_size: int,
    grpo_kl_coefficient: float,
    grpo_learning_rate: float,
    grpo_num_steps: int,
    image_gpu: str,
    image_light: str,
    registry_kubeflow_url: str,
    registry_repository: str,
    registry_weights_remote: str,
    run_skip_if_unchanged: bool,
    secret_git: str,
    secret_hub: str,
    secret_model_registry: str,
    secret_storage: str,
    section_cluster: dict[str, Any],
    section_evaluate: dict[str, Any],
    section_prepare_data: dict[str, Any],
    section_register: dict[str, Any],
    section_report: dict[str, Any],
    section_train_grpo: dict[str, Any],
    section_train_sft: dict[str, Any],
    section_validate_data: dict[str, Any],
    prepare_data_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    validate_data_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    train_sft_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    train_grpo_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    evaluate_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    report_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    register_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    cluster_config: dsl.OutputPath(dict),  # type: ignore[valid-type]
    evaluate_gpus: dsl.OutputPath(str),  # type: ignore[valid-type]
    evaluate_node_selector: dsl.OutputPath(dict),  # type: ignore[valid-type]
    configuration: dsl.Output[dsl.Markdown],
) -> None:
    """Check the run form and the cluster, name all that is wrong at once, and hand the sections on to the stages.

    The inputs are the parameters of the pipeline, where each is described; the outputs are the sections that they
    mean, what the pods that evaluate ask for, and the configuration as a page.
    """
    given = dict(locals())  # first of all: what the task was given, by name
    from components.preflight.preflight import run

    run(given)
