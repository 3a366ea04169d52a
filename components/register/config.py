"""The section `register` of a params file: where versions are registered, and under which name."""

from pydantic import Field

from components.shared.config import Config
from components.shared.versioning import MODEL_NAME, REGISTRY


class RegisterConfig(Config):
    """A git repository of versions whose weights are in a DVC remote."""

    registry: str = Field(REGISTRY, min_length=1)
    """Folder of the registry (created on first use), or URL of a git repository."""
    storage: str | None = None
    """Folder or URL of the DVC remote for the weights; null puts it next to a registry folder."""
    storage_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Address of the S3 server for a storage at s3://, where it is not Amazon's; null takes AWS_ENDPOINT_URL. A new
    registry keeps it, with AWS_REGION, so that whoever fetches a version needs credentials only."""
    name: str = Field(MODEL_NAME, pattern=r"^[a-z0-9](?:[a-z0-9-]*[a-z0-9])?$")
    """Name of the model in the registry, such as `grpo-policy`; its versions are tagged `<name>@v0.0.1`."""
    licence: str | None = Field(default=None, min_length=1)
    """Licence of the weights as the Hugging Face hub names it, such as apache-2.0, for the model card; null for
    unknown."""
    model_registry: str | None = None
    """Address of a Kubeflow Model Registry to which each version is announced, such as
    http://model-registry-service.kubeflow.svc.cluster.local:8080; null for none."""
