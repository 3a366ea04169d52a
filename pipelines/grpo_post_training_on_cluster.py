"""The graph as a Kubeflow cluster runs it: a form with typed parameters, a check before it, a clean-up after it."""

from collections.abc import Mapping
from typing import Any

from kfp import dsl

from components.clean_up.component import clean_up
from components.preflight.component import preflight
from components.preflight.config import SECRET_NAMES
from components.preflight.form import form_of
from components.shared import images
from pipelines import resources
from pipelines.grpo_post_training import PARAMS, stages

FORM: dict[str, Any] = {
    "cluster_gpu_product": "",
    "cluster_node_selector": {},
    "cluster_queue": "",
    "cluster_tolerations": [],
    "cluster_volume_claim": "grpo-pipeline",
    "image_gpu": images.GPU,
    "image_light": images.LIGHT,
    "image_pull_secret": "grpo-pipeline-images",
    "run_skip_if_unchanged": False,
    "section_cluster": {},
    **SECRET_NAMES,
    **form_of(PARAMS),
}
"""What every parameter is where nobody says otherwise."""


def _graph(form: Mapping[str, Any]) -> None:
    """The stages, with preflight before them and clean_up after whatever becomes of them."""
    run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    cleaned = clean_up(run_id=run_id, section_cluster=form["section_cluster"])
    with dsl.ExitHandler(cleaned, name="post-training"):
        checked = preflight(**{name: form[name] for name in preflight.component_spec.inputs})
        tasks = stages(checked.outputs, cluster=checked.outputs["cluster_config"], run_id=run_id)
    resources.on_cluster({"preflight": checked, **tasks, "clean_up": cleaned}, form, checked.outputs)


@dsl.pipeline(name="grpo-post-training-on-cluster")
def grpo_post_training_on_cluster(  # noqa: PLR0913, PLR0917 - the run form
    base_model: str = FORM["base_model"],
    cluster_gpu_product: str = FORM["cluster_gpu_product"],
    cluster_gpus_per_node: int = FORM["cluster_gpus_per_node"],
    cluster_node_selector: dict[str, Any] = FORM["cluster_node_selector"],
    cluster_num_nodes: int = FORM["cluster_num_nodes"],
    cluster_queue: str = FORM["cluster_queue"],
    cluster_tolerations: list[Any] = FORM["cluster_tolerations"],
    cluster_volume_claim: str = FORM["cluster_volume_claim"],
    data_repository: str = FORM["data_repository"],
    data_revision: str = FORM["data_revision"],
    grpo_group_size: int = FORM["grpo_group_size"],
    grpo_kl_coefficient: float = FORM["grpo_kl_coefficient"],
    grpo_learning_rate: float = FORM["grpo_learning_rate"],
    grpo_num_steps: int = FORM["grpo_num_steps"],
    image_gpu: str = FORM["image_gpu"],
    image_light: str = FORM["image_light"],
    image_pull_secret: str = FORM["image_pull_secret"],
    registry_kubeflow_url: str = FORM["registry_kubeflow_url"],
    registry_repository: str = FORM["registry_repository"],
    registry_weights_remote: str = FORM["registry_weights_remote"],
    run_skip_if_unchanged: bool = FORM["run_skip_if_unchanged"],
    secret_git: str = FORM["secret_git"],
    secret_hub: str = FORM["secret_hub"],
    secret_model_registry: str = FORM["secret_model_registry"],
    secret_storage: str = FORM["secret_storage"],
    section_cluster: dict[str, Any] = FORM["section_cluster"],
    section_evaluate: dict[str, Any] = FORM["section_evaluate"],
    section_prepare_data: dict[str, Any] = FORM["section_prepare_data"],
    section_register: dict[str, Any] = FORM["section_register"],
    section_report: dict[str, Any] = FORM["section_report"],
    section_train_grpo: dict[str, Any] = FORM["section_train_grpo"],
    section_train_sft: dict[str, Any] = FORM["section_train_sft"],
    section_validate_data: dict[str, Any] = FORM["section_validate_data"],
) -> None:
    """Fine-tune a base model, improve it with GRPO on a cluster, and register it if it is measurably better.

    Args:
        base_model: Model to start from: a Hugging Face id, a folder of the shared volume, or `scratch:<preset>`.
        cluster_gpu_product: Label nvidia.com/gpu.product of nodes to use, such as NVIDIA-H100-80GB-HBM3; empty for any.
        cluster_gpus_per_node: GPUs of each training pod, a process for each; 0 trains and measures on processors.
        cluster_node_selector: Labels that nodes with GPUs must have, as a JSON object.
        cluster_num_nodes: Training pods.
        cluster_queue: LocalQueue of Kueue in which training jobs wait; empty to run without Kueue.
        cluster_tolerations: Taints of nodes with GPUs that are put up with, as a JSON list of Kubernetes tolerations.
        cluster_volume_claim: Volume claim, ReadWriteMany, that every pod sees at /work.
        data_repository: URL of the git and DVC repository with the raw data; empty where no source reads a file.
        data_revision: Branch, tag or commit of data_repository; looked up once, at the beginning.
        grpo_group_size: Completions sampled per prompt.
        grpo_kl_coefficient: Weight of the KL divergence from the reference; 0 for no reference.
        grpo_learning_rate: Peak learning rate of GRPO.
        grpo_num_steps: Rollouts of the whole GRPO run.
        image_gpu: Image of all that runs a model.
        image_light: Image of everything else.
        image_pull_secret: Secret with which nodes pull the images; need not exist where they need none.
        registry_kubeflow_url: Address of Kubeflow Model Registry, to be told of each version; empty for none.
        registry_repository: Registry of versions: URL of a git repository, or a folder of the shared volume.
        registry_weights_remote: DVC remote for the weights of versions; empty puts them beside a registry folder.
        run_skip_if_unchanged: End at once where code, data and config are those of the newest registered version.
        secret_git: Secret with git's credentials, as GIT_CONFIG_COUNT, GIT_CONFIG_KEY_0 and GIT_CONFIG_VALUE_0.
        secret_hub: Secret with HF_TOKEN, for gated models.
        secret_model_registry: Secret with MODEL_REGISTRY_TOKEN, where the token of the service account is not enough.
        secret_storage: Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for DVC remotes.
        section_cluster: The rest of what training jobs ask for: memory, time limits, restarts, vLLM servers (JSON).
        section_evaluate: The rest of the section evaluate of the params file (JSON).
        section_prepare_data: The rest of the section prepare_data (JSON).
        section_register: The rest of the section register (JSON).
        section_report: The rest of the section report: the promotion gate (JSON).
        section_train_grpo: The rest of the section train_grpo (JSON).
        section_train_sft: The rest of the section train_sft (JSON).
        section_validate_data: The rest of the section validate_data (JSON).
    """
    _graph(dict(locals()))


@dsl.pipeline(name="grpo-post-training-minimal")
def grpo_post_training_minimal(  # noqa: PLR0913, PLR0917 - the run form
    base_model: str = FORM["base_model"],
    cluster_gpus_per_node: int = FORM["cluster_gpus_per_node"],
    cluster_num_nodes: int = FORM["cluster_num_nodes"],
    cluster_queue: str = FORM["cluster_queue"],
    cluster_volume_claim: str = FORM["cluster_volume_claim"],
    data_repository: str = FORM["data_repository"],
    data_revision: str = FORM["data_revision"],
    grpo_group_size: int = FORM["grpo_group_size"],
    grpo_kl_coefficient: float = FORM["grpo_kl_coefficient"],
    grpo_learning_rate: float = FORM["grpo_learning_rate"],
    grpo_num_steps: int = FORM["grpo_num_steps"],
    registry_repository: str = FORM["registry_repository"],
) -> None:
    """Fine-tune a base model, improve it with GRPO on a cluster, and register it; everything else as compiled.

    Args:
        base_model: Model to start from: a Hugging Face id, a folder of the shared volume, or `scratch:<preset>`.
        cluster_gpus_per_node: GPUs of each training pod, a process for each; 0 trains and measures on processors.
        cluster_num_nodes: Training pods.
        cluster_queue: LocalQueue of Kueue in which training jobs wait; empty to run without Kueue.
        cluster_volume_claim: Volume claim, ReadWriteMany, that every pod sees at /work.
        data_repository: URL of the git and DVC repository with the raw data; empty where no source reads a file.
        data_revision: Branch, tag or commit of data_repository; looked up once, at the beginning.
        grpo_group_size: Completions sampled per prompt.
        grpo_kl_coefficient: Weight of the KL divergence from the reference; 0 for no reference.
        grpo_learning_rate: Peak learning rate of GRPO.
        grpo_num_steps: Rollouts of the whole GRPO run.
        registry_repository: Registry of versions: URL of a git repository, or a folder of the shared volume.
    """
    _graph({**FORM, **locals()})
