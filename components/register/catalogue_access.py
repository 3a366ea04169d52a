"""How the model registry is reached: its address, and who asks. A secret is never an argument or a parameter."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from components.shared.errors import PipelineError

TOKEN_VARIABLE = "MODEL_REGISTRY_TOKEN"
TOKEN_FILE_VARIABLES = ("MODEL_REGISTRY_TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH")
CA_VARIABLE = "MODEL_REGISTRY_CA_FILE"
_POD_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_PORTS = {"http": 8080, "https": 443}


@dataclass(frozen=True)
class Access:
    """Where a model registry is, and where the token for it comes from."""

    address: str
    """With scheme and port."""
    token_file: Path | None
    ca_file: str | None
    environment: Mapping[str, str]

    @property
    def origin(self) -> str:
        """Where the token comes from, for a person."""
        if self.token_file is not None:
            return f"this one is from {self.token_file}"
        if TOKEN_VARIABLE in self.environment:
            return f"this one is from {TOKEN_VARIABLE}"
        return f"none was given; set {TOKEN_FILE_VARIABLES[0]} or {TOKEN_VARIABLE}"

    def token(self) -> str | None:
        """The token as it is now: files of tokens are renewed."""
        if self.token_file is not None:
            return self.token_file.read_text(encoding="utf-8").strip()
        return self.environment.get(TOKEN_VARIABLE)


def access_to(address: str, environment: Mapping[str, str] = os.environ) -> Access:
    """Return the way to a model registry, as the environment has it.

    Raises:
        PipelineError: The address is none, or a file that the environment names cannot be read.
    """
    parts = urlsplit(address)
    if parts.scheme not in _PORTS or not parts.hostname or parts.username:
        raise PipelineError(
            f"register.model_registry: {address} is no address; write one such as "
            "http://model-registry-service.kubeflow.svc.cluster.local:8080, without credentials"
        )
    port = parts.port or _PORTS[parts.scheme]
    named = [environment[name] for name in TOKEN_FILE_VARIABLES if environment.get(name)]
    file = Path(named[0]) if named else _POD_TOKEN if _POD_TOKEN.is_file() else None
    if environment.get(TOKEN_VARIABLE) and not environment.get(TOKEN_FILE_VARIABLES[0]):
        file = None
    ca_file = environment.get(CA_VARIABLE) or None
    for path, what in ((file, "token"), (Path(ca_file) if ca_file else None, "certificates")):
        if path is not None and not os.access(path, os.R_OK):
            raise PipelineError(f"{path}: is no file with {what} that can be read")
    return Access(f"{parts.scheme}://{parts.hostname}:{port}", file, ca_file, environment)
