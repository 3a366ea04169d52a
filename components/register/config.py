"""The section `register` of a params file: where versions are registered, and under which name."""

from pydantic import Field

from components.shared.config import Config


class RegisterConfig(Config):
    """A git repository of versions whose weights are in a DVC remote."""

    registry: str = Field("registry", min_length=1)
    """Folder of the registry (created on first use), or URL of a git repository."""
    storage: str | None = None
    """Folder or URL of the DVC remote for the weights; null puts it next to a registry folder."""
    name: str = Field("grpo-policy", pattern=r"^[a-z0-9](?:[a-z0-9-]*[a-z0-9])?$")
    """Name of the model in the registry, such as `grpo-policy`; its versions are tagged `<name>@v0.0.1`."""
    model_registry: str | None = None
    """Address of a Kubeflow Model Registry to which each version is announced, such as
    http://model-registry-service.kubeflow.svc.cluster.local:8080; null for none."""
