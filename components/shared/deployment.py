"""What a graph is compiled for: images, the shared volume and the secrets of a cluster."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from components.shared import images
from components.shared.config import Config

MOUNT = "/work"
"""Folder at which every pod of a run has the shared volume."""
LONGEST_TRAINING_S = 60 * 24 * 3600
"""Time after which Kubernetes ends the step of a training job, whatever the job's own limits are."""

SECRET_KEYS = {
    "git": ("GIT_CONFIG_COUNT", "GIT_CONFIG_KEY_0", "GIT_CONFIG_VALUE_0"),
    "hub": ("HF_TOKEN",),
    "judge": (),
    "model_registry": ("MODEL_REGISTRY_TOKEN",),
    "storage": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "tracking": (),
}
"""Keys of each secret that a run may use; a task has them as environment variables of the same name.

Git reads its three as a setting, such as `http.https://git.example/.extraHeader` with a header that authorises.
"""
OPTIONAL_SECRET_KEYS = {
    "judge": ("JUDGE_API_KEY", "OPENAI_API_KEY"),
    "storage": ("AWS_ENDPOINT_URL", "AWS_REGION"),
    "tracking": (
        "WANDB_API_KEY",
        "WANDB_BASE_URL",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
    ),
}
"""Keys that a secret may have in addition."""


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
        raise ValueError("should be a name that Kubernetes accepts: lower-case letters, digits, `-` and `.`")
    return name


KubernetesName = Annotated[str, AfterValidator(_checked_name)]
"""Name of an object in Kubernetes."""


class SecretsConfig(Config):
    """Names of Kubernetes secrets. One with its default name may be missing, where it is not needed."""

    git: KubernetesName = "grpo-pipeline-git"
    """With git's credentials, as GIT_CONFIG_COUNT, GIT_CONFIG_KEY_0 and GIT_CONFIG_VALUE_0."""
    hub: KubernetesName = "grpo-pipeline-hub"
    """With HF_TOKEN, for gated models."""
    judge: KubernetesName = "grpo-pipeline-judge"
    """With JUDGE_API_KEY or OPENAI_API_KEY, for the reward `judge`."""
    model_registry: KubernetesName = "grpo-pipeline-model-registry"
    """With MODEL_REGISTRY_TOKEN, where the token of the service account is not enough."""
    storage: KubernetesName = "grpo-pipeline-storage"
    """With AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for DVC remotes; and where the server is not Amazon's with
    AWS_ENDPOINT_URL and AWS_REGION."""
    tracking: KubernetesName = "grpo-pipeline-tracking"
    """With WANDB_API_KEY and WANDB_BASE_URL, or MLFLOW_TRACKING_TOKEN, _USERNAME and _PASSWORD, for trackers."""


class DeploymentConfig(Config):
    """What differs between clusters and not between runs: it is compiled into the graph."""

    image_light: str = Field(images.LIGHT, min_length=1)
    """Image of every task that runs no model."""
    image_gpu: str = Field(images.GPU, min_length=1)
    """Image of every task and every pod that runs a model."""
    image_pull_secret: KubernetesName = "grpo-pipeline-images"
    """Secret with which nodes pull the images; need not exist where they need none."""
    volume: KubernetesName = "grpo-pipeline"
    """Volume claim, ReadWriteMany, that every pod sees at /work."""
    secrets: SecretsConfig = SecretsConfig()
