"""Where versions are registered, and under which name."""

from pydantic import Field

from components.shared.config import Config


class RegisterConfig(Config):
    """A git repository of versions whose weights lie in a DVC remote."""

    registry: str = Field("outputs/registry", min_length=1)
    """Folder of the registry (made on first use), or URL of a git repository."""
    storage: str | None = None
    """Folder or URL of the DVC remote that holds the weights; null puts it beside a registry folder."""
    name: str = Field("grpo-policy", pattern=r"^[a-z0-9](?:[a-z0-9-]*[a-z0-9])?$")
    """Name of the model in the registry, such as `grpo-policy`; its versions are tagged `<name>@v0.0.1`."""
    model_registry: str | None = None
    """Address of a Kubeflow Model Registry that is told of each version, such as
    http://model-registry-service.kubeflow.svc.cluster.local:8080; null for none."""
