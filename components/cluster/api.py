"""The connection to the cluster's API server, in a pod or with a kubeconfig; every call has a deadline."""

import os
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException

from components.shared.environment import KUBECONFIG_VARIABLE
from components.shared.errors import PipelineError

_CONNECT_S, _READ_S = 5.0, 20.0
_UNAUTHORIZED = 401
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Connection(client.ApiClient):  # type: ignore[misc]  # the client has no types
    """A client whose calls have a deadline, and which reads its token again when that has been replaced."""

    def __init__(self) -> None:
        super().__init__(_configuration())

    def call_api(self, *args: Any, **options: Any) -> Any:
        """Make a call; see `kubernetes.client.ApiClient`."""
        if options.get("_request_timeout") is None:
            options["_request_timeout"] = (_CONNECT_S, _READ_S)
        try:
            return super().call_api(*args, **options)
        except client.ApiException as error:
            if error.status != _UNAUTHORIZED:
                raise
        fresh = _configuration()
        # With the token goes what would put the old one back before each call.
        self.configuration.api_key = fresh.api_key
        self.configuration.refresh_api_key_hook = fresh.refresh_api_key_hook
        return super().call_api(*args, **options)


def connect() -> Connection:
    """Return a connection; nothing is asked of the cluster yet. PipelineError where there is no cluster to be found."""
    return Connection()


def own_namespace() -> str:
    """Return the namespace of this pod, or of the kubeconfig's context; PipelineError where neither tells."""
    path = _SERVICE_ACCOUNT / "namespace"
    if KUBECONFIG_VARIABLE not in os.environ and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    try:
        _, active = config.list_kube_config_contexts(os.environ.get(KUBECONFIG_VARIABLE))
    except ConfigException as error:
        raise _no_cluster(error) from None
    namespace: str = active["context"].get("namespace", "default")
    return namespace


def _configuration() -> client.Configuration:
    loaded = client.Configuration()
    try:
        if KUBECONFIG_VARIABLE in os.environ or not _SERVICE_ACCOUNT.is_dir():
            config.load_kube_config(os.environ.get(KUBECONFIG_VARIABLE), client_configuration=loaded)
        else:
            config.load_incluster_config(client_configuration=loaded)
    except (ConfigException, OSError) as error:
        raise _no_cluster(error) from None
    loaded.retries = False  # whoever calls knows what may be asked for again, and how often
    return loaded


def _no_cluster(error: Exception) -> PipelineError:
    return PipelineError(
        f"no cluster is configured: {error}; run in a pod with a service account, or name a kubeconfig in "
        f"{KUBECONFIG_VARIABLE}"
    )
