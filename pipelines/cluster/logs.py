"""What the stages of a run print, as long as Kubeflow keeps it: from their pods, or from its archive after them.

The UI server of Kubeflow Pipelines has the logs and events of pods. Inside a cluster the address is that of the API
server, which has not: logs then come from Kubernetes.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from itertools import count, takewhile
from typing import Any

from components.shared.errors import PipelineError, RetryableError
from pipelines.cluster.kubeflow import Kubeflow, readable_errors
from pipelines.cluster.stages import CACHED, DRIVER_TEMPLATE, FINISHED, NOT_REACHED, StageStatus, planned, stages

LOST = "no pod of the run exists any more, so Kubeflow will never learn how it ended"
LOST_EVERY = 12
"""Polls of a run between checks whether its pods still exist."""
_POLL_S = 3.0
_ERROR = "error: "
_OTHERS = re.compile(r"[EFIW]\d{4} \d\d:|time=|\[KFP |Error: exit status")
"""Beginnings of the lines that Kubeflow and Argo add to what a stage prints."""
_FATAL = re.compile(r"^F\d{4} \S+ +\d+ \S+\] (.*\S)", re.MULTILINE)
"""The line with which a program of Kubeflow's own ends."""
_STOPPED = "Error: exit status 143"
"""What Argo prints at the end of a container that ended by SIGTERM."""
_NO_LOG = "Could not get main container logs"
_HARMLESS = "FailedToRetrieveImagePullSecret"
"""Reason of an event about a secret that need not exist."""


class NoLogError(PipelineError):
    """The server has no log of a pod: nothing was printed yet, or the pod is gone and its log was not archived."""


class _NoUiError(PipelineError):
    """The address is not that of a UI server."""


def failures(kubeflow: Kubeflow, run: Any) -> list[list[str]]:
    """Return for each failed stage the lines of the reason, in the stage's own words where it printed some."""
    reasons = [_failure(kubeflow, run, stage) for stage in stages(run) if stage.state == "FAILED"]
    if not reasons and run.error and run.error.message:
        return [[" ".join(run.error.message.split())]]
    return reasons


def is_lost(kubeflow: Kubeflow, run: Any) -> bool:
    """Tell whether a run that Kubeflow takes for unfinished has no pod left, as when its workflow was deleted."""
    pods = [stage.pods[-1] for stage in reversed(stages(run)) if stage.pods]
    try:
        return run.state not in FINISHED and bool(pods) and all(_is_gone(kubeflow, pod) for pod in pods)
    except PipelineError:
        return False


def logs(kubeflow: Kubeflow, run: Any, stage: str | None) -> Iterator[str]:
    """Yield what the stages of a run have printed, or one of them, each under its title.

    Raises:
        PipelineError: There was nothing at all.
    """
    is_empty = True
    for each in _chosen(run, stage):
        if not each.pods and (stage or each.state != NOT_REACHED):
            yield from (_heading(each, 1), f"({_why_no_pod(each)})")
        for attempt, pod in enumerate(each.pods, start=1):
            yield _heading(each, attempt)
            try:
                yield from _log(kubeflow, run, pod).splitlines()
                is_empty = False
            except NoLogError:
                yield f"({_why_no_log(kubeflow, run, each, pod)})"
    _check_not_empty(is_empty, run, stage)


def follow(
    kubeflow: Kubeflow, run_id: str, stage: str | None, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Yield what the stages print, as they do, until the run or the stage has ended.

    Raises:
        PipelineError: There was nothing at all, or no pod of the run exists any more.
    """
    shown: dict[str, int] = {}
    current = ""
    for poll in count(1):
        run = kubeflow.run(run_id)
        chosen = _chosen(run, stage)
        for each in chosen:
            for attempt, pod in enumerate(each.pods, start=1):
                new = _new_lines(kubeflow, run, each, pod, shown)
                if new and pod != current:
                    yield _heading(each, attempt)
                    current = pod
                yield from new
        if run.state in FINISHED or (stage and chosen and all(each.state in FINISHED for each in chosen)):
            return _check_not_empty(not current, run, stage)
        if poll % LOST_EVERY == 0 and is_lost(kubeflow, run):
            raise PipelineError(f"{run.display_name}: {LOST}")
        sleep(_POLL_S)


def _failure(kubeflow: Kubeflow, run: Any, stage: StageStatus) -> list[str]:
    if not stage.pods:
        return [f"{stage.title}: no pod of it ever began; see {kubeflow.url(run.run_id)}"]
    pod = stage.pods[-1]
    try:
        text = _log(kubeflow, run, pod)
    except NoLogError:
        return [f"{stage.title}: {_why_no_log(kubeflow, run, stage, pod)}"]
    except PipelineError as error:
        return [f"{stage.title}: {error}"]
    if DRIVER_TEMPLATE in pod:
        reason = [f"{stage.title}: could not be prepared: {message}" for message in _FATAL.findall(text)[-1:]]
    else:
        reason = _last_error(text)
    if not reason and text.rstrip().endswith(_STOPPED):
        return [f"{stage.title}: stopped from outside (SIGTERM): the run was stopped, or the stage ran out of time"]
    command = f"`grpo-pipeline logs {run.run_id} --stage {stage.name}`"
    return reason or [f"{stage.title} ended without an error message; see {command}"]


def _last_error(text: str) -> list[str]:
    """Return the last error that a stage printed, with the lines that belong to it."""
    lines = [line.strip() for line in text.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(_ERROR)]
    if not starts:
        return []
    first, *rest = lines[starts[-1] :]
    return [first.removeprefix(_ERROR), *takewhile(lambda line: line and not _OTHERS.match(line), rest)]


def _new_lines(kubeflow: Kubeflow, run: Any, stage: StageStatus, pod: str, shown: dict[str, int]) -> list[str]:
    """Return the lines that a pod has printed since the last time; none where its log is not available now."""
    if shown.get(pod) == -1:
        return []
    try:
        lines = _log(kubeflow, run, pod).splitlines(keepends=True)
    except (NoLogError, RetryableError):
        return []
    is_over = stage.state in FINISHED or run.state in FINISHED
    whole = lines if is_over or not lines or lines[-1].endswith("\n") else lines[:-1]
    new = whole[max(0, shown.get(pod, 0)) :]
    shown[pod] = -1 if is_over else len(whole)
    return [line.rstrip("\r\n") for line in new]


def _chosen(run: Any, stage: str | None) -> list[StageStatus]:
    """Return the stages asked for, which may be named as in the graph or as on the page."""
    begun = stages(run)
    if stage is None:
        return begun
    wanted = stage.replace("-", "_")
    if wanted not in {*planned(run), *(each.name for each in begun)}:
        raise PipelineError(f"{stage}: no such stage; there are {', '.join(planned(run))}")
    return [each for each in begun if wanted in (each.name, each.title)]


def _why_no_pod(stage: StageStatus) -> str:
    reasons = {CACHED: "not run: the cache has its outputs", NOT_REACHED: "not reached"}
    return reasons.get(stage.state, "no pod of it has begun")


def _why_no_log(kubeflow: Kubeflow, run: Any, stage: StageStatus, pod: str) -> str:
    warning = _warning(kubeflow, pod)
    if warning:
        return f"its pod printed nothing: {warning}"
    if stage.state in FINISHED or run.state in FINISHED:
        return "its log is gone: Kubeflow has removed the pod, and the log was not archived"
    return "its pod has not printed anything yet"


def _check_not_empty(is_empty: bool, run: Any, stage: str | None) -> None:
    if is_empty:
        raise PipelineError(f"{run.display_name}: no log of {stage or 'any stage'} is available")


def _heading(stage: StageStatus, attempt: int) -> str:
    return f"==> {stage.title}" + (f", attempt {attempt}" if len(stage.pods) > 1 else "") + " <=="


def _log(kubeflow: Kubeflow, run: Any, pod: str) -> str:
    """Return what a pod has printed so far, from the pod itself or from the archive once it is gone."""
    # The day is part of the archive's path on some installations.
    query = {"runid": run.run_id, "createdat": run.created_at.strftime("%Y-%m-%d")}
    try:
        status, text = _get(kubeflow, "/k8s/pod/logs", pod, query)
    except _NoUiError as error:
        return _log_from_kubernetes(kubeflow, pod, error)
    # The server reports a log that breaks off with a line at its end, under status 200.
    printed, marker, _ = text.partition(_NO_LOG)
    if status == 200 and (printed or not marker):
        return printed
    raise NoLogError(f"{pod}: it has no log")


def _log_from_kubernetes(kubeflow: Kubeflow, pod: str, no_ui: _NoUiError) -> str:
    """Return what a pod that still exists has printed so far."""
    from kubernetes.client import ApiException, CoreV1Api
    from urllib3.exceptions import HTTPError

    from components.cluster.kube import connect

    try:
        answer = CoreV1Api(connect()).read_namespaced_pod_log(
            pod, kubeflow.namespace, container="main", _preload_content=False
        )
    except ApiException as error:
        if error.status in (400, 404):
            raise NoLogError(f"{pod}: it has no log") from None
        raise PipelineError(f"{no_ui}, and the Kubernetes API says {error.reason}") from None
    except (HTTPError, PipelineError):
        raise no_ui from None
    return str(answer.data.decode("utf-8", errors="replace"))


def _is_gone(kubeflow: Kubeflow, pod: str) -> bool:
    """Tell whether a pod does not exist any more; False where the server does not know."""
    status, text = _get(kubeflow, "/k8s/pod", pod)
    return status != 200 and bool(re.search(r"not found|NotFound", text))


def _warning(kubeflow: Kubeflow, pod: str) -> str | None:
    """Return the last warning of Kubernetes about a pod, such as an image that cannot be pulled."""
    try:
        status, text = _get(kubeflow, "/k8s/pod/events", pod)
        events = json.loads(text)["items"] if status == 200 else []
    except (PipelineError, ValueError, KeyError):
        return None
    warnings = [each["message"] for each in events if each["type"] == "Warning" and each["reason"] != _HARMLESS]
    # Kubernetes repeats itself, ever shorter: the longest has the cause.
    return " ".join(max(warnings, key=len).split())[:300] if warnings else None


def _get(kubeflow: Kubeflow, path: str, pod: str, query: dict[str, str] | None = None) -> tuple[int, str]:
    """Ask the UI server about a pod; return status and text, also of its own refusals, which are text."""
    from kfp_server_api import ApiException

    with readable_errors(kubeflow.endpoint):
        try:
            answer = kubeflow.client._run_api.api_client.call_api(
                path,
                "GET",
                query_params=[("podname", pod), ("podnamespace", kubeflow.namespace), *(query or {}).items()],
                auth_settings=["Bearer"],
                _return_http_data_only=True,
                _preload_content=False,  # a log is no JSON
            )
        except ApiException as error:
            refusal = str(error.body or "")
            if error.status in (404, 500) and not refusal.lstrip().startswith(("{", "<")):
                return error.status, refusal
            if error.status == 404:
                raise _NoUiError(f"{kubeflow.endpoint}: has no {path}; pass the address of the UI") from None
            raise
        return 200, str(answer.data.decode("utf-8", errors="replace"))
