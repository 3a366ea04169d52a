"""The connection to Kubeflow Pipelines: its address and credentials, its runs, and its errors in one line."""

import functools
import io
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.shared.environment import COOKIE_VARIABLE, ENDPOINT_VARIABLES, NAMESPACE_VARIABLE, TOKEN_VARIABLE
from components.shared.errors import PipelineError, RetryableError

if TYPE_CHECKING:
    import kfp

_POD_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")
"""The file in which Kubeflow gives a pod its token for Kubeflow Pipelines."""
_IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
_REQUEST_TIMEOUT_S = 30
_STANDALONE = "kubeflow"
"""Namespace of runs if Kubeflow has a single user; the kfp client takes this value for no namespace."""
_RECENT = 100
"""Number of newest runs that are searched for a name, and of objects on a page of the API."""
_ID_LENGTH = 36
_ACTIONS = {
    401: "not authenticated; pass --token-file FILE, or set GRPO_PIPELINE_TOKEN or GRPO_PIPELINE_COOKIE",
    403: "permission denied; ask for access to the namespace, or name another with --namespace",
}


class NotFoundError(PipelineError):
    """The server has no such object, or no such path at all."""


class Kubeflow:
    """A connection to Kubeflow Pipelines, opened by the first request; in a pod, by default to its own cluster's.

    Errors are PipelineErrors of one line; a RetryableError means that the server cannot answer now.
    """

    def __init__(
        self,
        endpoint: str | None,
        namespace: str | None = None,
        token_file: Path | None = None,
        ca_file: Path | None = None,
    ) -> None:
        if endpoint is None and "KUBERNETES_SERVICE_HOST" not in os.environ:
            forward = "kubectl port-forward --namespace kubeflow service/ml-pipeline-ui 8080:80"
            raise PipelineError(
                f"no address of Kubeflow Pipelines: pass --endpoint URL or set {ENDPOINT_VARIABLES[0]}, such as "
                f"http://localhost:8080 after `{forward}`"
            )
        self.endpoint = (endpoint or _IN_CLUSTER).rstrip("/")
        if "://" not in self.endpoint:
            self.endpoint = f"https://{self.endpoint}"  # kfp does so, with a warning
        self._namespace = namespace
        self._token_file = token_file or (_POD_TOKEN if _POD_TOKEN.is_file() else None)
        self._ca_file = ca_file
        for path in filter(None, (self._token_file, ca_file)):
            path.open().close()  # an unreadable file fails here, with its name

    @cached_property
    def client(self) -> "kfp.Client":
        """The kfp client; PipelineError unless the server answers, accepts the credentials and knows the namespace."""
        import kfp
        from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials
        from urllib3.util import Retry

        class Client(kfp.Client):
            """Asks once whether the server is up; the original tries for half a minute, with a traceback each time."""

            def _load_config(self, *arguments: Any) -> Any:
                config = super()._load_config(*arguments)
                config.retries = Retry(2, read=0)  # of failed connections
                return config

            def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
                return self._healthz_api.healthz_service_get_healthz(_request_timeout=_REQUEST_TIMEOUT_S)

        logging.getLogger("urllib3").setLevel(logging.ERROR)
        with warnings.catch_warnings(), self._readable_errors():
            warnings.simplefilter("ignore", FutureWarning)
            client = Client(  # it reads the file of the token again for each request, as tokens are renewed
                host=self.endpoint,
                namespace=self._namespace or _STANDALONE,
                credentials=ServiceAccountTokenVolumeCredentials(str(self._token_file)) if self._token_file else None,
                existing_token=None if self._token_file else os.environ.get(TOKEN_VARIABLE),
                cookies=os.environ.get(COOKIE_VARIABLE),
                ssl_ca_cert=str(self._ca_file) if self._ca_file else None,
            )
            health = client.get_kfp_healthz()
        if getattr(health, "multi_user", None) is None:
            problem = "the answer is not from the API of Kubeflow Pipelines but perhaps from a login page"
            advice = f"pass --token-file FILE, or set {TOKEN_VARIABLE} or {COOKIE_VARIABLE}"
            raise PipelineError(f"{self.endpoint}: {problem}; {advice}")
        if health.multi_user and not (self._namespace or client.get_user_namespace()):
            advice = f"name the namespace of a profile with --namespace or {NAMESPACE_VARIABLE}"
            raise PipelineError(f"{self.endpoint}: this Kubeflow has several users; {advice}")
        self._wrap_requests(client._run_api.api_client)
        return client

    @cached_property
    def version(self) -> str:
        """The release of the API server, such as `2.17.0`, or else its commit; empty if the server does not tell."""
        health = json.loads(self.get("/apis/v2beta1/healthz", {}))
        # Names that the UI server and the API server use; the kfp client drops all of them.
        names = ("apiServerTagName", "tag_name", "apiServerCommitHash", "commit_sha", "frontendTagName")
        return next((health[name] for name in names if health.get(name) not in (None, "", "unknown")), "")

    def get(self, path: str, query: dict[str, str]) -> bytes:
        """Return the body of a response to a request for which the kfp client has no method."""
        options: dict[str, Any] = {"auth_settings": ["Bearer"], "_return_http_data_only": True}
        call = self.client._run_api.api_client.call_api
        answer: bytes = call(path, "GET", query_params=list(query.items()), _preload_content=False, **options).data
        return answer

    @property
    def user_namespace(self) -> str | None:
        """The namespace of the user's profile; None if Kubeflow has a single user."""
        return self._namespace or self.client.get_user_namespace() or None

    @property
    def namespace(self) -> str:
        """The namespace in which runs have their pods."""
        return self.user_namespace or _STANDALONE

    def experiment_id(self, name: str) -> str:
        """Return the id of the experiment of this name, which is created if there is none."""
        with redirect_stdout(io.StringIO()):  # the client prints addresses
            return str(self.client.create_experiment(name, namespace=self.user_namespace).experiment_id)

    def url(self, run_id: str) -> str:
        """Return the address of a run's page."""
        return f"{self.endpoint}/#/runs/details/{run_id}"

    def run(self, run_id: str) -> Any:
        """Return a run by its whole id; a missing `pipeline_spec` is taken from its uploaded pipeline version."""
        try:
            run = self.client.get_run(run_id)
        except NotFoundError:
            raise PipelineError(f"{run_id}: no such run; `grpo-pipeline status` lists them") from None
        version = run.pipeline_version_reference
        if not run.pipeline_spec and version:
            with suppress(NotFoundError):  # the version has been deleted
                uploaded = self.client.get_pipeline_version(version.pipeline_id, version.pipeline_version_id)
                run.pipeline_spec = uploaded.pipeline_spec
        return run

    def runs(self, page_size: int = _RECENT) -> Iterator[Any]:
        """Yield all runs, newest first; each page is requested only when it is needed."""
        options = {"page_size": page_size, "sort_by": "created_at desc", "namespace": self.user_namespace}
        return self.pages(self.client.list_runs, "runs", **options)

    def pages(self, list_page: Any, key: str, **options: Any) -> Iterator[Any]:
        """Yield the items of all pages that a method of the client returns, from the attribute `key` of each page."""
        token: str | None = ""
        while token is not None:
            page = list_page(page_token=token, **options)
            yield from getattr(page, key) or []
            token = page.next_page_token or None

    def schedules(self) -> list[Any]:
        """Return all schedules in the namespace, sorted by name, also those of other programs."""
        options = {"page_size": _RECENT, "namespace": self.user_namespace}
        schedules = self.pages(self.client.list_recurring_runs, "recurring_runs", **options)
        return sorted(schedules, key=lambda schedule: str(schedule.display_name))

    def find(self, name: str) -> Any:
        """Return the run with this id, name, or beginning of either; for the name of a schedule, its newest run."""
        if len(name) == _ID_LENGTH:
            return self.run(name)
        recent = list(islice(self.runs(), _RECENT))
        matching = [run for run in recent if run.run_id.startswith(name) or run.display_name == name]
        if not matching:
            schedules = {each.recurring_run_id for each in self.schedules() if each.display_name == name}
            newest_first = [run for run in recent if run.recurring_run_id in schedules]
            matching = newest_first[:1]
        if not matching:
            matching = [run for run in recent if str(run.display_name).startswith(name)]
        if len(matching) != 1:
            ids = ", ".join(run.run_id for run in matching[:5])
            problem = f"could be {ids}; give one of these" if ids else f"no such run among the last {_RECENT}"
            raise PipelineError(f"{name}: {problem}; `grpo-pipeline status` lists them")
        return self.run(matching[0].run_id)

    def _wrap_requests(self, api_client: Any) -> None:
        """Give each request of the client a time limit, without which it may wait for ever, and readable errors."""
        call = api_client.call_api

        @functools.wraps(call)
        def limited(*arguments: Any, **options: Any) -> Any:
            with self._readable_errors():
                return call(*arguments, **{**options, "_request_timeout": _REQUEST_TIMEOUT_S})

        api_client.call_api = limited

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        from kfp_server_api import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            from components.cluster.kube import error_message

            status, message = int(error.status or 0), " ".join(error_message(error).split())[:300]
            kind: type[PipelineError] = PipelineError
            if status in _ACTIONS:
                message = f"{_ACTIONS[status]} ({status})"
            elif status == 404:
                kind, message = NotFoundError, f"not a Kubeflow Pipelines API: {message}"
            elif status == 429 or status >= 500:
                kind, message = RetryableError, f"cannot answer now, try again later: {message}"
            raise kind(f"{self.endpoint}: {message}") from error
        except (HTTPError, OSError) as error:
            # The innermost reason; urllib3 puts a description of the connection before it.
            reason = re.sub(r"^\w+\(host=.*?\): ", "", str(getattr(error, "reason", None) or error))
            raise RetryableError(f"{self.endpoint}: cannot be reached ({' '.join(reason.split())[:200]})") from error
