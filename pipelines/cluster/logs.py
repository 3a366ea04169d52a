"""What the stages of a run print: from their pods, and from the object store once Kubeflow has deleted those.

The UI server of Kubeflow Pipelines has the logs and events of pods, and the files of the object store. Inside a cluster
the address is that of the API server, which has none of it: logs then come from Kubernetes, as long as there are pods.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count, takewhile
from typing import Any

from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import unwrapped
from pipelines.cluster.kubeflow import Kubeflow, NotFoundError
from pipelines.cluster.stages import (
    CACHED,
    DRIVER_TEMPLATE,
    FINISHED,
    NOT_REACHED,
    Stage,
    found_nothing_new,
    is_stopped,
    stages,
)

LOST = "no pod of the run exists any more, so Kubeflow never learns how it ended; start it again: training resumes"
_POLL_S = 5.0
_LOST_EVERY = 12
"""Polls of a run between checks whether its pods still exist."""
_LONGEST_SILENCE_S = 600.0
"""Longest time without an answer: a server that is restarted, a laptop that sleeps."""
_ALL = -1  # instead of a number of characters
_ERROR = "error: "
_OTHERS = re.compile(r"[EFIW]\d{4} \d\d:|time=|\[KFP |Error: exit status")
"""Beginnings of the lines that Kubeflow and Argo add to what a stage prints."""
_REPORTS = re.compile(
    r"^(?:I\d{4} \d\d:|time=\S+ level=INFO |\[KFP Executor \S+ \S+ INFO\]).*\n"
    r"(?:(?:(?<=\{\n)|\{\n)(?: .*\n)*(?:\}\n)?)?",
    re.MULTILINE,
)
"""Their lines without errors, with the JSON of a task's inputs and outputs: most of a short log."""
_FATAL = re.compile(r"^F\d{4} \S+ +\d+ \S+\] (.*\S)", re.MULTILINE)
_RETRYABLE = re.compile(rf"^F\d{{4}} .*: exit status {RetryableError.exit_code}$", re.MULTILINE)
"""Such a line for a step that may succeed the next time; its exit code is nowhere but in this log."""
_STOPPED = "Error: exit status 143"
"""What Argo prints at the end of a container that ended by SIGTERM."""
_STOP_HANDLED = re.compile(r"\w+: (?=stopped by SIG)")
"""Beginning of the lines in which a stopped stage says what has become of its training job and its checkpoints."""
_TRY_AGAIN = "this may pass: press Retry on the run's page, which keeps finished stages and resumes from checkpoints"
_NO_LOG = "Could not get main container logs"
_EXECUTOR_LOGS = re.compile(r'"(\w+)://([^/"\s]+)/([^"\s]+/executor-logs)(?:-\d+)?"')
"""Address of what a task's attempts printed, in the inputs that each of them prints."""
_HARMLESS = "FailedToRetrieveImagePullSecret"  # which need not exist
_PULLING = re.compile(r'Pulling image "([^"]+)"')
_PULLED = re.compile(r'(?:Successfully pulled|Container) image "([^"]+)"')
_NOT_PULLED = re.compile(
    # Without the steps of the container runtime before the one that failed.
    r'Failed to pull image "([^"]+)": (?:rpc error: code = \w+ desc = )?(?:[fF]ailed to [^:"]*(?:"[^"]*")?: )*(.*)',
    re.DOTALL,
)
_LONGEST_REASON = 300


class LostRunError(PipelineError):
    """No pod of the run exists any more."""

    exit_code = 1


def failures(kubeflow: Kubeflow, run: Any) -> list[list[str]]:
    """Return for each failed stage the lines of the reason, which the stage has printed if possible."""
    reasons = [_failure(kubeflow, run, stage) for stage in stages(run) if stage.state == "FAILED"]
    if not reasons and run.error and run.error.message:
        return [[" ".join(run.error.message.split())]]
    return reasons


def activity(kubeflow: Kubeflow, run: Any) -> list[str]:
    """Return the last progress and the last message of each running stage, or what it waits for."""
    lines: list[str] = []
    for stage in stages(run):
        if stage.state in ("PENDING", "RUNNING"):
            text, reason = _text(kubeflow, run, stage)
            messages = [f"{stage.title}: {reason}"] if text is None else _messages(stage, text)
            progress = [message for message in messages if re.match(r"\w+ \d+/\d+ ", message)]
            lines += dict.fromkeys([*progress[-1:], *messages[-1:]])  # once if they are the same line
    return lines


def outcome(kubeflow: Kubeflow, run: Any) -> list[str]:
    """Return the result of a run that succeeded: of its gate and its registration, or that nothing was new."""
    names = ("preflight",) if found_nothing_new(run) else ("report", "register")
    lines: list[str] = []
    for stage in stages(run):
        if stage.name in names:
            text, _ = _text(kubeflow, run, stage)
            lines += _messages(stage, text or "")
    return lines


def is_lost(kubeflow: Kubeflow, run: Any) -> bool:
    """Tell whether a run that Kubeflow takes for unfinished has no pod left, as when its workflow was deleted."""
    if run.state in FINISHED:
        return False
    pods = [stage.pods[-1] for stage in reversed(stages(run)) if stage.pods]
    try:
        for pod in pods:
            status, text = _ask_about_pod(kubeflow, "/k8s/pod", pod)
            if status == 200 or not re.search(r"not found|NotFound", text):
                return False
    except PipelineError:  # this address does not tell
        return False
    return bool(pods)


def poll(kubeflow: Kubeflow, run_id: str, clock: Any = time) -> Iterator[Any]:
    """Yield a run again and again until it has ended, also where the server does not answer for a while."""
    answered = clock.monotonic()
    for number in count(1):
        try:
            run = kubeflow.run(run_id)
        except RetryableError as error:
            if clock.monotonic() - answered > _LONGEST_SILENCE_S:
                raise
            print(f"{error}; trying again", file=sys.stderr)
        else:
            answered = clock.monotonic()
            yield run
            if run.state in FINISHED:
                return
            if number % _LOST_EVERY == 0 and is_lost(kubeflow, run):
                raise LostRunError(f"{run.display_name}: {LOST}")
        clock.sleep(_POLL_S)


def logs(kubeflow: Kubeflow, snapshots: Iterable[Any], name: str | None) -> Iterator[str]:
    """Yield the new lines in the logs of a run, or of its stage `name`, for each snapshot of the run, as `poll` yields.

    At the end, yield the reason for each attempt at a stage without a log. PipelineError if there is no log at all.
    """
    num_shown: dict[str, int] = {}  # characters of the log of each pod
    latest_pod = ""
    for run in snapshots:
        chosen = _chosen(run, name)
        for stage, pod, heading in _attempts(chosen):
            new_lines = _new_lines(kubeflow, run, stage, pod, num_shown)
            if new_lines and pod != latest_pod:
                yield heading
                latest_pod = pod
            yield from new_lines
        if name and all(stage.state in FINISHED for stage in chosen):
            break
    for stage, pod, heading in _attempts(chosen):
        # Not for stages that have not begun, and if all stages are shown, not for those that were never reached.
        is_expected = stage.state and (pod or name or stage.state != NOT_REACHED)
        if is_expected and not num_shown.get(pod):
            yield from (heading, f"({_why_no_log(kubeflow, run, stage, pod)})")
    if not latest_pod:
        raise PipelineError(f"{run.display_name}: no log of {name or 'any stage'} is available")


def _failure(kubeflow: Kubeflow, run: Any, stage: Stage) -> list[str]:
    """Return the lines of the reason for the failure of a stage."""
    text, why = _text(kubeflow, run, stage)
    if text is None:
        return [f"{stage.title}: {why}"]
    if DRIVER_TEMPLATE in stage.pods[-1]:
        reason = [f"{stage.title}: could not be prepared: {message}" for message in _FATAL.findall(text)[-1:]]
    else:
        reason = _last_error(text)
    if not reason and text.rstrip().endswith(_STOPPED):
        why = "the run was stopped" if is_stopped(run) else "the stage ran out of time, or its pod was deleted"
        return [f"{stage.title}: stopped from outside (SIGTERM): {why}"]
    if not reason:
        command = f"`grpo-pipeline logs {run.run_id} --stage {stage.name}`"
        reason = [f"{stage.title} ended without an error message; see {command}"]
    return [*reason, _TRY_AGAIN] if _RETRYABLE.search(text) else reason


def _text(kubeflow: Kubeflow, run: Any, stage: Stage) -> tuple[str | None, str]:
    """Return the log of the newest attempt at a stage, or else None and the reason why there is none."""
    pod = stage.pods[-1] if stage.pods else ""
    try:
        text = _log(kubeflow, run, stage, pod) if pod else None
    except PipelineError as error:
        return None, str(error)
    # While the image of a pod is missing, Kubernetes may return an empty log.
    has_log = text is not None and (text.strip() or not _missing_image(_events(kubeflow, pod)))
    return (text, "") if has_log else (None, _why_no_log(kubeflow, run, stage, pod))


def _messages(stage: Stage, text: str) -> list[str]:
    """Return a stage's own lines in its log: messages (`report: ...`) and progress (`train_grpo 3/200 ...`)."""
    name = stage.title.split()[0]
    return re.findall(rf"^{name}(?:: | \d+/\d+ ).*\S", unwrapped(text), re.MULTILINE)


def _last_error(text: str) -> list[str]:
    """Return the lines of the last error in a log, or of what a stopped stage said last; empty without any."""
    lines = [line.strip() for line in unwrapped(text).splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(_ERROR) or _STOP_HANDLED.match(line)]
    if not starts:
        return []
    first, *rest = lines[starts[-1] :]
    return [first.removeprefix(_ERROR), *takewhile(lambda line: line and not _OTHERS.match(line), rest)]


def _chosen(run: Any, name: str | None) -> list[Stage]:
    """Return the stages with this name or title, or all if it is None; PipelineError if there is no such stage."""
    every = stages(run)
    chosen = [each for each in every if name is None or name.replace("-", "_") in (each.name, each.title)]
    if name and not chosen:
        raise PipelineError(f"{name}: no such stage; there are {', '.join(each.title for each in every)}")
    return chosen


def _attempts(chosen: Iterable[Stage]) -> Iterator[tuple[Stage, str, str]]:
    """Yield the stage, the pod and the heading of each attempt; of a stage without pods, once, with an empty pod."""
    for stage in chosen:
        for number, pod in enumerate(stage.pods or [""], start=1):
            attempt = f", attempt {number}" if len(stage.pods) > 1 else ""
            yield stage, pod, f"==> {stage.title}{attempt} <=="


def _new_lines(kubeflow: Kubeflow, run: Any, stage: Stage, pod: str, num_shown: dict[str, int]) -> list[str]:
    """Return the complete lines that a pod has printed since the last call, and count them in `num_shown`.

    Kubeflow's own lines are left out, unless they are the whole log of a pod that has ended.
    """
    if not pod or num_shown.get(pod) == _ALL:
        return []
    try:
        text = _log(kubeflow, run, stage, pod)
    except RetryableError:
        if run.state in FINISHED:
            raise
        return []  # the next snapshot may bring an answer
    if text is None:
        return []
    is_over = _is_over(run, stage, pod)
    if not is_over:
        text = text[: text.rfind("\n") + 1]
    to_show = _REPORTS.sub("", text) or (text if is_over else "")
    new_lines = to_show[num_shown.get(pod, 0) :].splitlines()
    num_shown[pod] = _ALL if is_over else len(to_show)
    return new_lines


def _why_no_log(kubeflow: Kubeflow, run: Any, stage: Stage, pod: str) -> str:
    """Return the reason why an attempt at a stage has no log."""
    if not pod:
        reasons = {CACHED: "not run: the cache has its outputs", NOT_REACHED: "not reached"}
        return reasons.get(str(stage.state), "no pod of it has begun")
    events, is_over = _events(kubeflow, pod), _is_over(run, stage, pod)
    if problem := _missing_image(events, is_over=is_over):
        return problem
    warnings = [each["message"] for each in events if each["type"] == "Warning" and each["reason"] != _HARMLESS]
    if warnings:
        # Kubernetes repeats itself, ever shorter: the longest has the cause.
        return f"its pod printed nothing: {' '.join(max(warnings, key=len).split())[:_LONGEST_REASON]}"
    if is_over:
        return "its log is gone: Kubeflow has removed the pod, and this address has no archived log of it"
    return "its pod has not printed anything yet"


def _is_over(run: Any, stage: Stage, pod: str) -> bool:
    """Tell whether a pod of a stage has ended, as far as Kubeflow knows."""
    return pod != stage.pods[-1] or stage.state in FINISHED or run.state in FINISHED


def _events(kubeflow: Kubeflow, pod: str) -> list[dict[str, Any]]:
    """Return the events of a pod; empty if they cannot be read."""
    with suppress(PipelineError, ValueError, KeyError):  # a refusal is text, not JSON
        try:
            _, text = _ask_about_pod(kubeflow, "/k8s/pod/events", pod)
        except NotFoundError:  # the address is not that of a UI server
            about = {"field_selector": f"involvedObject.name={pod}"}
            text = _ask_kubernetes(kubeflow, lambda api: api.list_namespaced_event, **about) or ""
        return [each for each in json.loads(text)["items"] if "message" in each]
    return []


def _missing_image(events: Iterable[dict[str, Any]], *, is_over: bool = False) -> str:
    """Return which image a pod waits for, or waited for until it ended, and why; empty if it has all images."""
    messages = [each["message"] for each in events]
    pulled = {match[1] for match in map(_PULLED.match, messages) if match}
    failed = [match for match in map(_NOT_PULLED.match, messages) if match and match[1] not in pulled]
    if failed:
        image, message = failed[-1].groups()
        reason = " ".join(message.removeprefix(f"{image}: ").split())[:_LONGEST_REASON]
        return f"image {image} cannot be pulled: {reason}"
    pulling = [match[1] for match in map(_PULLING.match, messages) if match and match[1] not in pulled]
    if not pulling:
        return ""
    slow = f"image {pulling[-1]} was not pulled in the time of the stage; pull it onto the nodes before, or try again"
    return slow if is_over else f"image {pulling[-1]} is being pulled"


def _log(kubeflow: Kubeflow, run: Any, stage: Stage, pod: str) -> str | None:
    """Return a pod's log: from the pod, Argo's archive or the stage's artifact `executor-logs`; None without a log.

    Each pod is an attempt. The other logs contain the address of the artifact, which ends in the number of the attempt.
    """
    try:
        text = _log_of_pod(kubeflow, run, stage, pod)
    except NotFoundError:  # the address is not that of a UI server
        return _ask_kubernetes(kubeflow, lambda api: api.read_namespaced_pod_log, name=pod, container="main")
    if text is None and _is_over(run, stage, pod):
        other_logs = (_log_of_pod(kubeflow, run, stage, each) or "" for each in stage.pods if each != pod)
        address = next(filter(None, map(_EXECUTOR_LOGS.search, other_logs)), None)
        if address:
            provider, bucket, key = address.groups()
            text = _stored(kubeflow, provider, bucket, f"{key}-{stage.pods.index(pod)}")
    return text


def _log_of_pod(kubeflow: Kubeflow, run: Any, stage: Stage, pod: str) -> str | None:
    """Return a pod's log from the UI server, or else from Argo's archive; None if neither has it."""
    # The day is part of the archive's path on some installations.
    query = {"runid": run.run_id, "createdat": run.created_at.strftime("%Y-%m-%d")}
    status, text = _ask_about_pod(kubeflow, "/k8s/pod/logs", pod, **query)
    # Where a log breaks off, the server still answers 200, and appends a line that says so.
    printed, marker, _ = text.partition(_NO_LOG)
    if status == 200 and (printed or not marker):
        return printed
    # The UI server looks in Argo's archive under another name of the workflow. The path there has the day on which the
    # workflow was created: after the run itself, perhaps past midnight, or by Retry.
    changes = [each.update_time for each in run.state_history or [] if each.update_time]
    moments = (run.created_at, run.created_at + timedelta(minutes=5), *changes)
    for day in dict.fromkeys(f"{moment:%Y/%m/%d}" for moment in moments):
        key = f"private-artifacts/{kubeflow.namespace}/{stage.workflow}/{day}/{pod}/main.log"
        archived = _stored(kubeflow, "minio", "mlpipeline", key)  # where Kubeflow's manifests have Argo archive logs
        if archived is not None:
            return archived
    return None


def _ask_kubernetes(kubeflow: Kubeflow, method: Callable[[Any], Any], **arguments: str) -> str | None:
    """Return the answer of a method of Kubernetes' core API; None if it has none (status 400 or 404).

    It is asked if the address is not that of a UI server.
    """
    from kubernetes.client import ApiException, CoreV1Api
    from urllib3.exceptions import HTTPError

    from components.cluster.kube import connect

    try:
        request = method(CoreV1Api(connect()))
        answer = request(namespace=kubeflow.namespace, _preload_content=False, **arguments)
    except (ApiException, HTTPError, PipelineError) as error:
        if getattr(error, "status", None) in (400, 404):
            return None
        raise PipelineError(f"{kubeflow.endpoint}: has no /k8s/pod/logs; pass the address of the UI") from error
    return str(answer.data.decode("utf-8", errors="replace"))


def _stored(kubeflow: Kubeflow, provider: str, bucket: str, key: str) -> str | None:
    """Return a file of the object store, or None."""
    query = {"source": provider, "namespace": kubeflow.namespace, "bucket": bucket, "key": key}
    status, text = _ask(kubeflow, "/artifacts/get", query)
    return text if status == 200 else None


def _ask_about_pod(kubeflow: Kubeflow, path: str, pod: str, **query: str) -> tuple[int, str]:
    return _ask(kubeflow, path, {"podname": pod, "podnamespace": kubeflow.namespace, **query})


def _ask(kubeflow: Kubeflow, path: str, query: dict[str, str]) -> tuple[int, str]:
    """Return status and text of the UI server's answer, even if it finds nothing; NotFoundError from other servers."""
    try:
        return 200, kubeflow.get(path, query).decode("utf-8", errors="replace")
    except PipelineError as error:
        response = error.__cause__  # an ApiException, or an error of the connection without these attributes
        status, text = getattr(response, "status", 0), str(getattr(response, "body", None) or "")
        # The UI server answers in plain text, the API server in JSON, and a proxy in HTML.
        if status in (404, 500) and not text.lstrip().startswith(("{", "<")):
            return status, text
        raise
