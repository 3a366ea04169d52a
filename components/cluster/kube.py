"""The Kubernetes API: a connection, a retry policy, and the training jobs of a namespace with their pods and logs."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from components.shared.environment import KUBECONFIG_VARIABLE
from components.shared.errors import PipelineError, RetryableError

Json = dict[str, Any]
Timeout = tuple[float, float]
"""Seconds to connect and to read. The client ignores a single number that is no integer, and waits for ever."""

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
"""The custom resource TrainJob."""
KUEUE, KUEUE_VERSION = "kueue.x-k8s.io", "v1beta2"
"""Kueue's custom resources; its group of queue positions has the same version."""
WORKFLOWS = ("argoproj.io", "v1alpha1", "workflows")
"""The custom resource of which Kubeflow Pipelines makes one for each run."""
KFP_RUN_ID, COMPLETED = "pipeline/runid", "workflows.argoproj.io/completed"
"""Labels of a workflow: its run, and `true` once it has ended."""
MANAGED_BY, PROJECT = "app.kubernetes.io/managed-by", "grpo-pipeline"
"""Label of every object of this project, and its value."""
RUN_ID, STAGE = "grpo-pipeline/run-id", "grpo-pipeline/stage"
"""Labels of every object of a run."""
WORK, JOB_SET = "grpo-pipeline/work", "jobset.sigs.k8s.io/jobset-name"
"""Labels of the pods of a training job: a digest of its folder of checkpoints, to which one job writes at a time; the
job's name."""
RUN_NAME, HEARTBEAT, SPEC_DIGEST = "grpo-pipeline/run-name", "grpo-pipeline/heartbeat", "grpo-pipeline/spec-digest"
"""Annotations: name of the run on Kubeflow's page; when the step that waits for a job was last known to be alive
(RFC 3339); SHA-256 of what was submitted, by which a repeated step recognises its job."""

_TIMEOUT: Timeout = (5.0, 20.0)
_FOLLOW_TIMEOUT: Timeout = (5.0, 90.0)
"""For the next line of a log: a connection may be lost without notice."""
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_FORBIDDEN, _NOT_FOUND, _CONFLICT, _UNAVAILABLE = 403, 404, 409, 503
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_TRANSIENT = {401, 408, 409, 410, 429, 500, 502, 503, 504}
"""Statuses that may change: a token that is being replaced, a lost race, a busy server."""
_TRANSIENT_MESSAGES = ("context deadline exceeded", "failed calling webhook", "failed to call webhook")
"""Messages about a webhook that did not answer in time, also where another one denied the request for that reason."""
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Clock:
    """The time, which tests replace."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


class _Client(client.ApiClient):  # type: ignore[misc]  # the client has no types
    """A client whose calls have a deadline."""

    def call_api(self, *args: Any, **options: Any) -> Any:
        """Make a call; see `kubernetes.client.ApiClient`."""
        timeout = options.get("_request_timeout") or _TIMEOUT
        return super().call_api(*args, **{**options, "_request_timeout": timeout})


def connect() -> client.ApiClient:
    """Return a client for the cluster of this pod or of the kubeconfig; PipelineError where none is configured."""
    loaded = client.Configuration()
    with _needs_cluster():
        if KUBECONFIG_VARIABLE in os.environ or not _SERVICE_ACCOUNT.is_dir():
            config.load_kube_config(os.environ.get(KUBECONFIG_VARIABLE), client_configuration=loaded)
        else:
            config.load_incluster_config(client_configuration=loaded)
    loaded.retries = False  # callers know what may be repeated, and how often
    return _Client(loaded)


def own_namespace() -> str:
    """Return the namespace of this pod, or of the kubeconfig's context. Raises as `connect`."""
    path = _SERVICE_ACCOUNT / "namespace"
    if KUBECONFIG_VARIABLE not in os.environ and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    with _needs_cluster():
        _, active = config.list_kube_config_contexts(os.environ.get(KUBECONFIG_VARIABLE))
    return str(active["context"].get("namespace", "default"))


@contextmanager
def _needs_cluster() -> Iterator[None]:
    try:
        yield
    except (ConfigException, OSError) as error:
        raise PipelineError(
            f"no cluster is configured: {error}; run in a pod with a service account, or set {KUBECONFIG_VARIABLE} to "
            "the path of a kubeconfig"
        ) from None


class UnavailableError(RetryableError):
    """The cluster did not do in time what it was asked to; nothing is known to have changed."""


@dataclass(frozen=True)
class RetryPolicy:
    """Repeats calls of the API server, which is restarted, upgraded and busy at times: for 15 minutes by default."""

    clock: Clock = Clock()
    limit_s: float = 900.0

    def call(self, action: str, request: Callable[[], _Answer]) -> _Answer:
        """Return the answer to a request, which errors name by `action`, as in "list pods".

        UnavailableError where there is no answer in time, PipelineError where the API server refuses.
        """
        began, pause = self.clock.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return request()
            except (client.ApiException, HTTPError) as error:
                if not is_transient(error):
                    raise PipelineError(f"the cluster refuses to {action}: {error_message(error)}") from None
                left = self.limit_s - (self.clock.monotonic() - began)
                if left <= 0:
                    within = f" within {self.limit_s:g} s" if self.limit_s else ""
                    raise UnavailableError(f"the API server did not {action}{within}: {error_message(error)}") from None
                asked = (getattr(error, "headers", None) or {}).get("Retry-After", "")
                self.clock.sleep(min(float(asked if asked.isdigit() else 0) or pause, _LONGEST_PAUSE_S, left))
                pause = min(2 * pause, _LONGEST_PAUSE_S)


def is_transient(error: client.ApiException | HTTPError) -> bool:
    """Tell whether the same call may succeed the next time."""
    if isinstance(error, HTTPError) or error.status in _TRANSIENT:
        return True
    return any(message in error_message(error) for message in _TRANSIENT_MESSAGES)


def error_message(error: client.ApiException | HTTPError) -> str:
    """Return in one line why a call failed."""
    if isinstance(error, HTTPError):
        return str(error).split("\n", 1)[0]
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    return f"{message} ({error.status})"


@contextmanager
def _accepting(*statuses: int) -> Iterator[None]:
    try:
        yield
    except client.ApiException as error:
        if error.status not in statuses:
            raise


def unfinished_workflows(api: client.ApiClient, namespace: str) -> dict[str, Json]:
    """Return the workflow of each run that has not ended, by the run's id. Raises as `TrainJobs`."""
    group, version, plural = WORKFLOWS
    items: list[Json] = []
    with _accepting(_NOT_FOUND):  # a namespace for training jobs alone may be in a cluster without workflows
        items = client.CustomObjectsApi(api).list_namespaced_custom_object(
            group, version, namespace, plural, label_selector=f"{KFP_RUN_ID},{COMPLETED}!=true"
        )["items"]
    return {each["metadata"]["labels"][KFP_RUN_ID]: each for each in items}


class TrainJobs:
    """The training jobs of a namespace, their pods, events and logs, as plain JSON.

    Every call raises kubernetes.client.ApiException where it is refused, urllib3.exceptions.HTTPError where there is no
    answer.
    """

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._api = api
        self._custom = client.CustomObjectsApi(api)
        self._resource = (GROUP, VERSION, namespace, PLURAL)

    def get(self, name: str) -> Json | None:
        """Return a job; None where it does not exist."""
        job: Json | None = None
        with _accepting(_NOT_FOUND):
            job = self._custom.get_namespaced_custom_object(*self._resource, name)
        return job

    def find(self, labels: Mapping[str, str]) -> list[Json]:
        """Return the jobs of this project that have these labels."""
        selector = ",".join(f"{name}={value}" for name, value in {MANAGED_BY: PROJECT, **labels}.items())
        return list(self._custom.list_namespaced_custom_object(*self._resource, label_selector=selector)["items"])

    def create(self, manifest: Json) -> None:
        """Submit a job, unless one of this name exists; a field that the cluster does not know is an error."""
        with _accepting(_CONFLICT):  # also where an earlier call succeeded whose answer was lost
            self._custom.create_namespaced_custom_object(*self._resource, manifest, field_validation="Strict")

    def delete(
        self, name: str, *, unchanged: Json | None = None, pods_first: bool = False, timeout: Timeout = _TIMEOUT
    ) -> bool:
        """Delete a job with its pods; return whether it existed.

        With the metadata `unchanged`, a job that has changed since is left alone, and False is returned. With
        `pods_first`, the job exists until all its pods are gone.
        """
        required = unchanged and client.V1Preconditions(
            uid=unchanged["uid"], resource_version=unchanged["resourceVersion"]
        )
        policy = "Foreground" if pods_first else "Background"
        options = client.V1DeleteOptions(propagation_policy=policy, preconditions=required)
        with _accepting(_NOT_FOUND, *([_CONFLICT] if unchanged else [])):
            self._custom.delete_namespaced_custom_object(*self._resource, name, body=options, _request_timeout=timeout)
            return True
        return False

    def patch(self, job: Json, metadata: Json) -> None:
        """Merge something into a job's metadata, unless another job has taken its name."""
        changes = {"metadata": {"uid": job["metadata"]["uid"], **metadata}}
        self._custom.patch_namespaced_custom_object(*self._resource, job["metadata"]["name"], changes)

    def pod(self, name: str, timeout: Timeout = _TIMEOUT) -> Json | None:
        """Return a pod; None where it does not exist. Listing is all that a step's role allows."""
        pods = self._list("pods", timeout, fieldSelector=f"metadata.name={name}")
        return pods[0] if pods else None

    def pods(self, label: str, value: str) -> list[Json]:
        """Return the pods with this label: of a job (`JOB_SET`), or of all jobs with the same checkpoints (`WORK`)."""
        return self._list("pods", labelSelector=f"{label}={value}")

    def events(self, about: Json) -> list[Json]:
        """Return the events of an object, the oldest first."""
        events = self._list("events", fieldSelector=f"involvedObject.uid={about['metadata']['uid']}")
        return sorted(events, key=lambda each: each.get("lastTimestamp") or "")

    def workload(self, job: Json) -> Json | None:
        """Return what Kueue keeps about a job; None where it keeps nothing yet."""
        selector = f"{KUEUE}/job-uid={job['metadata']['uid']}"
        location = (KUEUE, KUEUE_VERSION, self.namespace, "workloads")
        items = self._custom.list_namespaced_custom_object(*location, label_selector=selector)["items"]
        return next(iter(items), None)

    def queue_position(self, workload: Json) -> int | None:
        """Return how many workloads the ClusterQueue looks at before this one; None where Kueue does not tell."""
        queue, name = workload["spec"].get("queueName", ""), workload["metadata"]["name"]
        group = f"/apis/visibility.{KUEUE}/{KUEUE_VERSION}"
        with _accepting(_NOT_FOUND, _FORBIDDEN, _UNAVAILABLE):
            answer = self._get(f"localqueues/{queue}/pendingworkloads", {}, _TIMEOUT, group)
            items = json.loads(answer.data)["items"]
            return next((each["positionInClusterQueue"] for each in items if each["metadata"]["name"] == name), None)
        return None

    def log(self, pod: str, container: str, *, follow: bool, since: str | None = None) -> Any:
        """Return the response whose body is a log, each line with its time; with `follow` it does not end."""
        query = {"container": container, "follow": str(follow).lower(), "timestamps": "true"}
        query |= {"sinceTime": since} if since else {}
        return self._get(f"pods/{pod}/log", query, _FOLLOW_TIMEOUT if follow else _TIMEOUT)

    def _list(self, resource: str, timeout: Timeout = _TIMEOUT, **query: str) -> list[Json]:
        items: list[Json] = json.loads(self._get(resource, query, timeout).data)["items"]
        return items

    def _get(self, path: str, query: Mapping[str, str], timeout: Timeout, group: str = "/api/v1") -> Any:
        # A request that the client's own methods do not know, such as one with `sinceTime`.
        return self._api.call_api(
            f"{group}/namespaces/{self.namespace}/{path}",
            "GET",
            query_params=list(query.items()),
            header_params={"Accept": "application/json, */*"},
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=False,
            _request_timeout=timeout,
        )
