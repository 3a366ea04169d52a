"""The way to Kubeflow Pipelines: its address, who asks, and what goes wrong on the way in one line."""

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.shared.environment import (
    CA_VARIABLE,
    COOKIE_VARIABLE,
    ENDPOINT_VARIABLES,
    NAMESPACE_VARIABLE,
    TOKEN_FILE_VARIABLES,
    TOKEN_VARIABLE,
)
from components.shared.errors import PipelineError
from pipelines.cluster.explained import explained

if TYPE_CHECKING:
    import kfp

_POD_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")
"""Where Kubeflow gives a pod its token for Kubeflow Pipelines."""
_IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
_REQUEST_TIMEOUT_S = 30


@dataclass(frozen=True)
class Settings:
    """Where Kubeflow Pipelines is and how to prove who asks. A secret is never part of it but by its file's name."""

    endpoint: str
    namespace: str | None
    """Of the runs; None where Kubeflow has one user only."""
    token_file: Path | None
    """Read again for each request: tokens are renewed."""
    ca_file: Path | None


def settings(
    environment: Mapping[str, str],
    *,
    endpoint: str | None = None,
    namespace: str | None = None,
    token_file: Path | None = None,
    ca_file: Path | None = None,
) -> Settings:
    """Return what was asked for, or else what the environment says, or else what holds in a pod of the cluster."""
    files = [environment[name] for name in TOKEN_FILE_VARIABLES if environment.get(name)]
    found = token_file or (Path(files[0]) if files else _POD_TOKEN if _POD_TOKEN.is_file() else None)
    ca = environment.get(CA_VARIABLE)
    return Settings(
        endpoint=(endpoint or _endpoint(environment)).rstrip("/"),
        namespace=namespace or environment.get(NAMESPACE_VARIABLE) or None,
        token_file=_readable(found, "token"),
        ca_file=_readable(ca_file or (Path(ca) if ca else None), "certificates"),
    )


def _endpoint(environment: Mapping[str, str]) -> str:
    for name in ENDPOINT_VARIABLES:
        if environment.get(name):
            return environment[name]
    if "KUBERNETES_SERVICE_HOST" in environment:
        return _IN_CLUSTER
    raise PipelineError(
        f"no address of Kubeflow Pipelines: give --endpoint URL or set {ENDPOINT_VARIABLES[0]}, such as "
        "http://localhost:8080 behind `kubectl port-forward --namespace kubeflow service/ml-pipeline-ui 8080:80`"
    )


def _readable(path: Path | None, what: str) -> Path | None:
    if path is not None and not os.access(path, os.R_OK):
        raise PipelineError(f"{path}: is no file with {what} that can be read")
    return path


def connect(to: Settings) -> "kfp.Client":
    """Return a client that has reached Kubeflow Pipelines; one line where it has not."""
    import warnings

    import kfp
    from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials

    class Client(kfp.Client):
        """Asks once whether the server is there: the original tries for half a minute, with a traceback each time."""

        def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
            return self._healthz_api.healthz_service_get_healthz(_request_timeout=_REQUEST_TIMEOUT_S)

    logging.getLogger("urllib3").setLevel(logging.ERROR)
    with warnings.catch_warnings(), explained(to.endpoint):
        warnings.simplefilter("ignore", FutureWarning)
        client = Client(
            host=to.endpoint,
            namespace=to.namespace or "kubeflow",  # the name by which this client means none
            credentials=ServiceAccountTokenVolumeCredentials(str(to.token_file)) if to.token_file else None,
            existing_token=None if to.token_file else os.environ.get(TOKEN_VARIABLE),
            cookies=os.environ.get(COOKIE_VARIABLE),
            ssl_ca_cert=str(to.ca_file) if to.ca_file else None,
        )
        _bound(client._run_api.api_client.rest_client)
        _check(client.get_kfp_healthz(), to.endpoint, client.get_user_namespace())
    return client


def _check(health: Any, endpoint: str, namespace: str) -> None:
    if getattr(health, "multi_user", None) is None:
        raise PipelineError(
            f"{endpoint}: answers with something else than the API of Kubeflow Pipelines, such as a page to log in; "
            f"give --token-file FILE, or set {TOKEN_VARIABLE} or {COOKIE_VARIABLE}"
        )
    if health.multi_user and not namespace:
        raise PipelineError(
            f"{endpoint}: this Kubeflow has several users; name the namespace of a profile with --namespace "
            f"or {NAMESPACE_VARIABLE}"
        )


def _bound(rest: Any) -> None:
    """Have requests of the client end in time; by itself it would wait for ever, and ask four times."""
    from urllib3.util import Retry

    rest.request = functools.partial(_with_timeout, rest.request)
    rest.pool_manager.connection_pool_kw["retries"] = Retry(2, read=0)
    rest.pool_manager.clear()


def _with_timeout(request: Any, *arguments: Any, **options: Any) -> Any:
    """Make a request of the client with a limit for how long its answer may take."""
    return request(*arguments, **{**options, "_request_timeout": options.get("_request_timeout") or _REQUEST_TIMEOUT_S})
