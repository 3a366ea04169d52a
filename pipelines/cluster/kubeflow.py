"""The connection to Kubeflow Pipelines: its address and credentials, its runs, and its errors in one line."""

import functools
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import islice
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
from components.shared.errors import PipelineError, RetryableError

if TYPE_CHECKING:
    import kfp

_POD_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")
"""The file in which Kubeflow gives a pod its token for Kubeflow Pipelines."""
_IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
_REQUEST_TIMEOUT_S = 30
_STANDALONE = "kubeflow"
"""Namespace of the runs where Kubeflow has one user only; also the name by which the kfp client means none."""
_RECENT = 100
_ID_LENGTH = 36
_ACTIONS = {
    401: "not authenticated; pass --token-file FILE, or set GRPO_PIPELINE_TOKEN or GRPO_PIPELINE_COOKIE",
    403: "permission denied; ask for access to the namespace, or name another with --namespace",
}


@dataclass(frozen=True)
class Settings:
    """The address of Kubeflow Pipelines and how to authenticate. It holds no secret, only the name of its file."""

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
    """Return the arguments, or else what the environment says, or else what holds in a pod of the cluster.

    Raises:
        PipelineError: There is no address, or a file cannot be read.
    """

    def variable(*names: str) -> str | None:
        return next((environment[name] for name in names if environment.get(name)), None)

    in_pod = _POD_TOKEN if _POD_TOKEN.is_file() else None
    in_cluster = _IN_CLUSTER if "KUBERNETES_SERVICE_HOST" in environment else None
    address = endpoint or variable(*ENDPOINT_VARIABLES) or in_cluster
    if address is None:
        raise PipelineError(
            f"no address of Kubeflow Pipelines: pass --endpoint URL or set {ENDPOINT_VARIABLES[0]}, such as "
            "http://localhost:8080 behind `kubectl port-forward --namespace kubeflow service/ml-pipeline-ui 8080:80`"
        )
    return Settings(
        endpoint=address.rstrip("/"),
        namespace=namespace or variable(NAMESPACE_VARIABLE),
        token_file=_readable(token_file or variable(*TOKEN_FILE_VARIABLES) or in_pod, "the token"),
        ca_file=_readable(ca_file or variable(CA_VARIABLE), "certificates"),
    )


def connect(to: Settings) -> "Kubeflow":
    """Return a connection that has reached Kubeflow Pipelines.

    Raises:
        PipelineError: It was not reached, or needs other credentials or a namespace.
    """
    import warnings

    import kfp
    from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials

    class Client(kfp.Client):
        """Asks once whether the server is up: the original tries for half a minute, with a traceback each time."""

        def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
            return self._healthz_api.healthz_service_get_healthz(_request_timeout=_REQUEST_TIMEOUT_S)

    logging.getLogger("urllib3").setLevel(logging.ERROR)
    with warnings.catch_warnings(), readable_errors(to.endpoint):
        warnings.simplefilter("ignore", FutureWarning)
        client = Client(
            host=to.endpoint,
            namespace=to.namespace or _STANDALONE,
            credentials=ServiceAccountTokenVolumeCredentials(str(to.token_file)) if to.token_file else None,
            existing_token=None if to.token_file else os.environ.get(TOKEN_VARIABLE),
            cookies=os.environ.get(COOKIE_VARIABLE),
            ssl_ca_cert=str(to.ca_file) if to.ca_file else None,
        )
        _limit_requests(client._run_api.api_client.rest_client)
        namespace = to.namespace or client.get_user_namespace() or None
        _check_health(client.get_kfp_healthz(), to.endpoint, namespace)
    return Kubeflow(client, to.endpoint, namespace)


@dataclass(frozen=True)
class Kubeflow:
    """A connection to Kubeflow Pipelines."""

    client: "kfp.Client"
    endpoint: str
    user_namespace: str | None
    """Of a profile; None where Kubeflow has one user only."""
    _pipelines: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The pipelines of versions that runs refer to."""

    @property
    def namespace(self) -> str:
        """The namespace in which runs have their pods."""
        return self.user_namespace or _STANDALONE

    def url(self, run_id: str) -> str:
        """Return the page of a run."""
        return f"{self.endpoint}/#/runs/details/{run_id}"

    def experiment(self, name: str) -> str:
        """Return the id of an experiment, created if there is none of this name."""
        with readable_errors(self.endpoint), redirect_stdout(io.StringIO()):  # the client prints an address of its own
            return str(self.client.create_experiment(name, namespace=self.user_namespace).experiment_id)

    def run(self, run_id: str) -> Any:
        """Return a run by its whole id; its `pipeline_spec` is there also where the pipeline was uploaded before."""
        with readable_errors(self.endpoint, missing=f"{run_id}: no such run; `grpo-pipeline status` lists them"):
            run = self.client.get_run(run_id)
        if not run.pipeline_spec and run.pipeline_version_reference:
            run.pipeline_spec = self._pipeline(run.pipeline_version_reference)
        return run

    def runs(self, page_size: int = _RECENT) -> Iterator[Any]:
        """Yield all runs, the newest first; a page is requested when the one before it is used up."""
        return self.pages(self.client.list_runs, "runs", page_size=page_size, sort_by="created_at desc")

    def pages(self, list_: Any, key: str, **options: Any) -> Iterator[Any]:
        """Yield what a method of the client lists, page by page."""
        token: str | None = ""
        while token is not None:
            with readable_errors(self.endpoint):
                page = list_(page_token=token, namespace=self.user_namespace, **options)
            yield from getattr(page, key) or []
            token = page.next_page_token or None

    def find(self, name: str) -> Any:
        """Return the run with this id, beginning of an id, or name.

        Raises:
            PipelineError: There is none, or more than one.
        """
        if len(name) == _ID_LENGTH:
            return self.run(name)
        matching = [
            run for run in islice(self.runs(), _RECENT) if run.run_id.startswith(name) or run.display_name == name
        ]
        if not matching:
            raise PipelineError(f"{name}: no such run among the last {_RECENT}; `grpo-pipeline status` lists them")
        if len(matching) > 1:
            ids = ", ".join(run.run_id for run in matching[:5])
            raise PipelineError(f"{name}: ambiguous, could be {ids}; give more of the id")
        return self.run(matching[0].run_id)

    def _pipeline(self, version: Any) -> Any:
        """Return the pipeline of a version; None once the version has been deleted."""
        from kfp_server_api import ApiException

        id_ = version.pipeline_version_id
        if id_ not in self._pipelines:
            with readable_errors(self.endpoint):
                try:
                    self._pipelines[id_] = self.client.get_pipeline_version(version.pipeline_id, id_).pipeline_spec
                except ApiException as error:
                    if error.status != 404:
                        raise
                    self._pipelines[id_] = None
        return self._pipelines[id_]


@contextmanager
def readable_errors(endpoint: str, *, missing: str = "") -> Iterator[None]:
    """Turn what goes wrong in the block into an error for people; `missing` is the message for a 404."""
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise _refusal(endpoint, error, missing) from None
    except (HTTPError, OSError) as error:
        raise RetryableError(f"{endpoint}: cannot be reached ({_reason(error)})") from None


def _refusal(endpoint: str, error: Any, missing: str) -> PipelineError:
    status, message = int(error.status or 0), _message(error)
    if status in _ACTIONS:
        return PipelineError(f"{endpoint}: {_ACTIONS[status]} ({status})")
    if status == 404:
        return PipelineError(missing or f"{endpoint}: not a Kubeflow Pipelines API: {message} (404)")
    if status == 429 or status >= 500:
        return RetryableError(f"{endpoint}: cannot answer now, try again later: {message} ({status})")
    return PipelineError(f"{endpoint}: {message} ({status})")


def _message(error: Any) -> str:
    """Return the message in a server's answer, in one line."""
    try:
        body = json.loads(error.body or "")
        text = str(body.get("message") or body.get("error") or body.get("error_message"))
    except (ValueError, AttributeError):
        text = str(error.reason)  # a proxy's page says less than the reason before it
    return " ".join(text.split())[:300]


def _reason(error: BaseException) -> str:
    """Return the innermost reason, without the description of the connection before it."""
    inner = getattr(error, "reason", None)
    text = str(inner if isinstance(inner, BaseException) else error)
    return " ".join(re.sub(r"^\w+\(host=.*?\): ", "", text).split())[:200]


def _readable(path: Path | str | None, content: str) -> Path | None:
    if path is not None and not os.access(path, os.R_OK):
        raise PipelineError(f"{path}: cannot read {content} from this file")
    return None if path is None else Path(path)


def _check_health(health: Any, endpoint: str, namespace: str | None) -> None:
    if getattr(health, "multi_user", None) is None:
        raise PipelineError(
            f"{endpoint}: the answer is not from the API of Kubeflow Pipelines, but perhaps from a login page; "
            f"pass --token-file FILE, or set {TOKEN_VARIABLE} or {COOKIE_VARIABLE}"
        )
    if health.multi_user and not namespace:
        raise PipelineError(
            f"{endpoint}: this Kubeflow has several users; name the namespace of a profile with --namespace "
            f"or {NAMESPACE_VARIABLE}"
        )


def _limit_requests(rest: Any) -> None:
    """Limit the time of each of the client's requests; by itself it would wait for ever, and ask four times."""
    from urllib3.util import Retry

    request = rest.request

    @functools.wraps(request)
    def limited(*arguments: Any, **options: Any) -> Any:
        timeout = options.get("_request_timeout") or _REQUEST_TIMEOUT_S
        return request(*arguments, **{**options, "_request_timeout": timeout})

    rest.request = limited
    rest.pool_manager.connection_pool_kw["retries"] = Retry(2, read=0)
    rest.pool_manager.clear()
