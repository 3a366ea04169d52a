"""What a graph is compiled for: images, the shared volume and the secrets of a cluster."""

from pydantic import Field

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


class SecretsConfig(Config):
    """Names of Kubernetes secrets. One with its default name may be missing, where it is not needed."""

    git: str = Field("grpo-pipeline-git", min_length=1)
    """With git's credentials, as GIT_CONFIG_COUNT, GIT_CONFIG_KEY_0 and GIT_CONFIG_VALUE_0."""
    hub: str = Field("grpo-pipeline-hub", min_length=1)
    """With HF_TOKEN, for gated models."""
    judge: str = Field("grpo-pipeline-judge", min_length=1)
    """With JUDGE_API_KEY or OPENAI_API_KEY, for the reward `judge`."""
    model_registry: str = Field("grpo-pipeline-model-registry", min_length=1)
    """With MODEL_REGISTRY_TOKEN, where the token of the service account is not enough."""
    storage: str = Field("grpo-pipeline-storage", min_length=1)
    """With AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for DVC remotes; and where the server is not Amazon's with
    AWS_ENDPOINT_URL and AWS_REGION."""
    tracking: str = Field("grpo-pipeline-tracking", min_length=1)
    """With WANDB_API_KEY and WANDB_BASE_URL, or MLFLOW_TRACKING_TOKEN, _USERNAME and _PASSWORD, for trackers."""


class DeploymentConfig(Config):
    """What differs between clusters and not between runs: it is compiled into the graph."""

    image_light: str = Field(images.LIGHT, min_length=1)
    """Image of every task that runs no model."""
    image_gpu: str = Field(images.GPU, min_length=1)
    """Image of every task and every pod that runs a model."""
    image_pull_secret: str = Field("grpo-pipeline-images", min_length=1)
    """Secret with which nodes pull the images; need not exist where they need none."""
    volume: str = Field("grpo-pipeline", min_length=1)
    """Volume claim, ReadWriteMany, that every pod sees at /work."""
    secrets: SecretsConfig = SecretsConfig()
