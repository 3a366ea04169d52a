"""The Kubernetes API: connection, retry policy, and the training jobs of a namespace with their pods and logs."""

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
"""Seconds to connect and to read. The client ignores a single float, and would wait for ever."""
GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"  # the custom resource TrainJob
KUEUE, KUEUE_VERSION = "kueue.x-k8s.io", "v1beta2"
"""Kueue's custom resources; its group of queue positions has the same version."""
WORKFLOWS = ("argoproj.io", "v1alpha1", "workflows")  # the custom resource for a run of Kubeflow Pipelines
KFP_RUN_ID, COMPLETED = "pipeline/runid", "workflows.argoproj.io/completed"
"""Labels of a workflow: the id of its run, and `true` once it has ended."""
MANAGED_BY, PROJECT = "app.kubernetes.io/managed-by", "grpo-pipeline"
"""Label of every object of this project, and the label's value."""
RUN_ID, STAGE = "grpo-pipeline/run-id", "grpo-pipeline/stage"  # labels of every object of a run
WORK, JOB_SET = "grpo-pipeline/work", "jobset.sigs.k8s.io/jobset-name"
"""Labels of a training job's pods: a digest of its folder of checkpoints, to which one job writes at a time, and the
job's name."""
RUN_NAME, HEARTBEAT, SPEC_DIGEST = "grpo-pipeline/run-name", "grpo-pipeline/heartbeat", "grpo-pipeline/spec-digest"
"""Annotations: name of the run on Kubeflow's page; time (RFC 3339) at which the step that waits for the job was last
alive; SHA-256 of what was submitted, by which a repeated step recognises its job."""

_TIMEOUT: Timeout = (5.0, 20.0)
_FOLLOW_TIMEOUT: Timeout = (5.0, 90.0)
"""Limits the wait for the next line of a log, because a connection may be lost without notice."""
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_FORBIDDEN, _NOT_FOUND, _CONFLICT, _UNAVAILABLE = 403, 404, 409, 503
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_TRANSIENT = {401, 408, 409, 410, 429, 500, 502, 503, 504}
"""Statuses that may pass: a token that is being replaced, a lost race, a busy server."""
_TRANSIENT_MESSAGES = ("context deadline exceeded", "failed calling webhook", "failed to call webhook")
"""Parts of messages about a webhook that did not answer in time."""
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Clock:
    """Functions for the time, which tests replace."""

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
    """Return a client for the cluster of this pod or of the kubeconfig; PipelineError if neither is configured."""
    loaded = client.Configuration()
    with _needs_cluster():
        if KUBECONFIG_VARIABLE in os.environ or not _SERVICE_ACCOUNT.is_dir():
            config.load_kube_config(os.environ.get(KUBECONFIG_VARIABLE), client_configuration=loaded)
        else:
            config.load_incluster_config(client_configuration=loaded)
    loaded.retries = False  # callers decide what may be repeated, and how often
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
    """The cluster did not do something in time; it may still do it later."""


@dataclass(frozen=True)
class RetryPolicy:
    """Repeats calls to the API server for `limit_s`, because it may be busy, or restarted by an upgrade."""

    clock: Clock = Clock()
    limit_s: float = 900.0

    def call(self, action: str, request: Callable[[], _Answer]) -> _Answer:
        """Return the answer to a request to do `action`; PipelineError if it is refused, UnavailableError if late."""
        began, pause = self.clock.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return request()
            except (client.ApiException, HTTPError) as error:
                if not is_transient(error):
                    raise PipelineError(f"the cluster refuses to {action}: {error_message(error)}") from None
                left_s = self.limit_s - (self.clock.monotonic() - began)
                if left_s <= 0:
                    within = f" within {self.limit_s:g} s" if self.limit_s else ""
                    raise UnavailableError(f"the API server did not {action}{within}: {error_message(error)}") from None
                retry_after = (getattr(error, "headers", None) or {}).get("Retry-After", "")
                requested = float(retry_after) if retry_after.isdigit() else 0.0  # it may also be a date
                self.clock.sleep(min(requested or pause, _LONGEST_PAUSE_S, left_s))
                pause = min(2 * pause, _LONGEST_PAUSE_S)


def is_transient(error: client.ApiException | HTTPError) -> bool:
    """Tell whether the same call may succeed later."""
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
def _ignoring(*statuses: int) -> Iterator[None]:
    """Suppress the API's errors with these statuses."""
    try:
        yield
    except client.ApiException as error:
        if error.status not in statuses:
            raise


def unfinished_workflows(api: client.ApiClient, namespace: str) -> dict[str, Json]:
    """Return the workflows of unfinished runs by the run's id. Raises the same errors as `TrainJobs`."""
    group, version, plural = WORKFLOWS
    with _ignoring(_NOT_FOUND):  # a cluster for training jobs alone may lack Argo's workflows
        unfinished = client.CustomObjectsApi(api).list_namespaced_custom_object(
            group, version, namespace, plural, label_selector=f"{KFP_RUN_ID},{COMPLETED}!=true"
        )
        return {each["metadata"]["labels"][KFP_RUN_ID]: each for each in unfinished["items"]}
    return {}


class TrainJobs:
    """A namespace's training jobs, pods, events and logs, as JSON; ApiException if refused, HTTPError if unanswered."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._api = api
        self._custom = client.CustomObjectsApi(api)
        self._resource = (GROUP, VERSION, namespace, PLURAL)

    def get(self, name: str) -> Json | None:
        """Return a job; None if it does not exist."""
        with _ignoring(_NOT_FOUND):
            job: Json = self._custom.get_namespaced_custom_object(*self._resource, name)
            return job
        return None

    def find(self, labels: Mapping[str, str]) -> list[Json]:
        """Return the jobs of this project that have these labels."""
        selector = ",".join(f"{name}={value}" for name, value in {MANAGED_BY: PROJECT, **labels}.items())
        return list(self._custom.list_namespaced_custom_object(*self._resource, label_selector=selector)["items"])

    def create(self, manifest: Json) -> None:
        """Submit a job unless one of this name exists; ApiException if the cluster does not know a field."""
        with _ignoring(_CONFLICT):  # an earlier try may have succeeded without its answer arriving
            self._custom.create_namespaced_custom_object(*self._resource, manifest, field_validation="Strict")

    def delete(
        self, name: str, *, unchanged: Json | None = None, pods_first: bool = False, timeout: Timeout = _TIMEOUT
    ) -> bool:
        """Delete a job, with `pods_first` after its pods; return False if it is gone, or its metadata has changed."""
        options = client.V1DeleteOptions(propagation_policy="Foreground" if pods_first else "Background")
        ignored = [_NOT_FOUND]
        if unchanged is not None:
            version = {"uid": unchanged["uid"], "resource_version": unchanged["resourceVersion"]}
            options.preconditions = client.V1Preconditions(**version)
            ignored.append(_CONFLICT)
        with _ignoring(*ignored):
            self._custom.delete_namespaced_custom_object(*self._resource, name, body=options, _request_timeout=timeout)
            return True
        return False

    def patch(self, job: Json, metadata: Json) -> None:
        """Merge `metadata` into a job's; ApiException if another job has taken its name, which the uid shows."""
        changes = {"metadata": {"uid": job["metadata"]["uid"], **metadata}}
        self._custom.patch_namespaced_custom_object(*self._resource, job["metadata"]["name"], changes)

    def pod(self, name: str, timeout: Timeout = _TIMEOUT) -> Json | None:
        """Return a pod; None if it does not exist."""
        # It lists pods, because the role of a step has no permission to get a single one.
        pods = self._list("pods", timeout, fieldSelector=f"metadata.name={name}")
        return pods[0] if pods else None

    def pods(self, label: str, value: str) -> list[Json]:
        """Return pods by label: those of a job (`JOB_SET`), or of all jobs with the same checkpoints (`WORK`)."""
        return self._list("pods", labelSelector=f"{label}={value}")

    def events(self, about: Json) -> list[Json]:
        """Return the events of an object, oldest first."""
        events = self._list("events", fieldSelector=f"involvedObject.uid={about['metadata']['uid']}")
        return sorted(events, key=lambda each: each.get("lastTimestamp") or "")

    def workload(self, job: Json) -> Json | None:
        """Return Kueue's Workload of a job; None if there is none yet."""
        selector = f"{KUEUE}/job-uid={job['metadata']['uid']}"
        location = (KUEUE, KUEUE_VERSION, self.namespace, "workloads")
        items = self._custom.list_namespaced_custom_object(*location, label_selector=selector)["items"]
        return next(iter(items), None)

    def queue_position(self, workload: Json) -> int | None:
        """Return the number of workloads before this one in its ClusterQueue; None if Kueue does not tell."""
        queue, name = workload["spec"].get("queueName", ""), workload["metadata"]["name"]
        group = f"/apis/visibility.{KUEUE}/{KUEUE_VERSION}"
        with _ignoring(_NOT_FOUND, _FORBIDDEN, _UNAVAILABLE):
            answer = self._get(f"localqueues/{queue}/pendingworkloads", {}, _TIMEOUT, group)
            items = json.loads(answer.data)["items"]
            return next((each["positionInClusterQueue"] for each in items if each["metadata"]["name"] == name), None)
        return None

    def log(self, pod: str, container: str, *, follow: bool, since: str | None = None) -> Any:
        """Return a response that streams timestamped log lines; with `follow`, until the container ends."""
        query = {"container": container, "follow": str(follow).lower(), "timestamps": "true"}
        query |= {"sinceTime": since} if since else {}
        return self._get(f"pods/{pod}/log", query, _FOLLOW_TIMEOUT if follow else _TIMEOUT)

    def _list(self, resource: str, timeout: Timeout = _TIMEOUT, **query: str) -> list[Json]:
        return list(json.loads(self._get(resource, query, timeout).data)["items"])

    def _get(self, path: str, query: Mapping[str, str], timeout: Timeout, group: str = "/api/v1") -> Any:
        # The client's own methods lack some parameters, such as `sinceTime`.
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
