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
_PATIENCE_S = 600.0
"""Longest time without an answer: a server that is restarted, a laptop that sleeps."""
_ALL = -1
_ERROR = "error: "
_OTHERS = re.compile(r"[EFIW]\d{4} \d\d:|time=|\[KFP |Error: exit status")
"""Beginnings of the lines that Kubeflow and Argo add to what a stage prints."""
_REPORTS = re.compile(
    r"^(?:I\d{4} \d\d:|time=\S+ level=INFO |\[KFP Executor \S+ \S+ INFO\]).*\n"
    r"(?:(?:(?<=\{\n)|\{\n)(?: .*\n)*(?:\}\n)?)?",
    re.MULTILINE,
)
"""What they report while all is well, with the JSON of a task's inputs and outputs: most of a short log."""
_FATAL = re.compile(r"^F\d{4} \S+ +\d+ \S+\] (.*\S)", re.MULTILINE)
_RETRYABLE = re.compile(rf"^F\d{{4}} .*: exit status {RetryableError.exit_code}$", re.MULTILINE)
"""The same line for a step that may succeed the next time: its exit code gets no further than this log."""
_STOPPED = "Error: exit status 143"
"""What Argo prints at the end of a container that ended by SIGTERM."""
_STOP_HANDLED = re.compile(r"\w+: (?=stopped by SIG)")
"""Beginning of the lines in which a stopped stage says what has become of its training job and its checkpoints."""
_WITH_OUTCOME = ("report", "register")
_TRY_AGAIN = "this may pass: press Retry on the run's page, which keeps finished stages and resumes from checkpoints"
_NO_LOG = "Could not get main container logs"
_STORE = ("minio", "mlpipeline")
"""Provider and bucket in which Kubeflow's manifests have Argo archive logs."""
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
    """Return for each failed stage the lines of the reason, in the stage's own words where it printed some."""
    reasons = [_failure(kubeflow, run, stage) for stage in stages(run) if stage.state == "FAILED"]
    if not reasons and run.error and run.error.message:
        return [[" ".join(run.error.message.split())]]
    return reasons


def activity(kubeflow: Kubeflow, run: Any) -> list[str]:
    """Return what each running stage does: its last progress, such as step and reward, or what it waits for."""
    lines = []
    for stage in stages(run):
        if stage.state in ("PENDING", "RUNNING"):
            text, reason = _text(kubeflow, run, stage)
            own = [f"{stage.title}: {reason}"] if text is None else _messages(stage, text)
            last_progress = [line for line in own if ": " not in line.partition("  ")[0]][-1:]  # not a message
            lines += [*last_progress, *(own[-1:] if own[-1:] != last_progress else [])]
    return lines


def outcome(kubeflow: Kubeflow, run: Any) -> list[str]:
    """Return what a run that succeeded has led to: its gate and the version it registered, or that nothing was new."""
    names = ("preflight",) if found_nothing_new(run) else _WITH_OUTCOME
    concluding = [stage for stage in stages(run) if stage.name in names]
    return [line for stage in concluding for line in _messages(stage, _text(kubeflow, run, stage)[0] or "")]


def is_lost(kubeflow: Kubeflow, run: Any) -> bool:
    """Tell whether a run that Kubeflow takes for unfinished has no pod left, as when its workflow was deleted."""
    pods = [stage.pods[-1] for stage in reversed(stages(run)) if stage.pods]
    answers = (_ask_ui(kubeflow, "/k8s/pod", pod) for pod in pods)
    with suppress(PipelineError):
        is_gone = (status != 200 and re.search(r"not found|NotFound", text) for status, text in answers)
        return run.state not in FINISHED and bool(pods) and all(is_gone)
    return False


def poll(kubeflow: Kubeflow, run_id: str, clock: Any = time) -> Iterator[Any]:
    """Yield a run again and again until it has ended, also where the server does not answer for a while."""
    answered = clock.monotonic()
    for number in count(1):
        try:
            run = kubeflow.run(run_id)
        except RetryableError as error:
            if clock.monotonic() - answered > _PATIENCE_S:
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


def logs(kubeflow: Kubeflow, moments: Iterable[Any], stage: str | None) -> Iterator[str]:
    """Yield what the stages of a run, or one of them, print, and at the end why others have no log.

    `moments` are the states of the run as it goes on.
    """
    num_shown: dict[str, int] = {}
    current = ""
    for run in moments:
        chosen = _chosen(run, stage)
        for each, pod, heading in _attempts(chosen):
            new = _new_lines(kubeflow, run, each, pod, num_shown)
            if new and pod != current:
                yield heading
                current = pod
            yield from new
        if stage and chosen and all(each.state in FINISHED for each in chosen):
            break
    for each, pod, heading in _attempts(chosen):
        is_expected = each.state and (pod or stage or each.state != NOT_REACHED)
        if is_expected and not num_shown.get(pod):
            yield from (heading, f"({_why_no_log(kubeflow, run, each, pod)})")
    if not current:
        raise PipelineError(f"{run.display_name}: no log of {stage or 'any stage'} is available")


def _failure(kubeflow: Kubeflow, run: Any, stage: Stage) -> list[str]:
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
    command = f"`grpo-pipeline logs {run.run_id} --stage {stage.name}`"
    reason = reason or [f"{stage.title} ended without an error message; see {command}"]
    return [*reason, *([_TRY_AGAIN] if _RETRYABLE.search(text) else [])]


def _text(kubeflow: Kubeflow, run: Any, stage: Stage) -> tuple[str | None, str]:
    pod = stage.pods[-1] if stage.pods else ""
    try:
        text = _log(kubeflow, run, stage, pod) if pod else None
    except PipelineError as error:
        return None, str(error)
    # Of a pod whose image is missing, Kubernetes may give an empty log.
    is_there = text is not None and (text.strip() or not _missing_image(_events(kubeflow, pod)))
    return (text, "") if is_there else (None, _why_no_log(kubeflow, run, stage, pod))


def _messages(stage: Stage, text: str) -> list[str]:
    name = stage.title.split()[0]
    return re.findall(rf"^{name}(?:: | \d+/\d+ ).*\S", unwrapped(text), re.MULTILINE)


def _last_error(text: str) -> list[str]:
    lines = [line.strip() for line in unwrapped(text).splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(_ERROR) or _STOP_HANDLED.match(line)]
    if not starts:
        return []
    first, *rest = lines[starts[-1] :]
    return [first.removeprefix(_ERROR), *takewhile(lambda line: line and not _OTHERS.match(line), rest)]


def _chosen(run: Any, stage: str | None) -> list[Stage]:
    every = stages(run)
    chosen = [each for each in every if stage is None or stage.replace("-", "_") in (each.name, each.title)]
    if stage and not chosen:
        raise PipelineError(f"{stage}: no such stage; there are {', '.join(each.title for each in every)}")
    return chosen


def _attempts(chosen: Iterable[Stage]) -> Iterator[tuple[Stage, str, str]]:
    """Yield each attempt at a stage with its pod and its heading; without a pod where there was none."""
    for stage in chosen:
        for attempt, pod in enumerate(stage.pods or [""], start=1):
            yield stage, pod, f"==> {stage.title}" + (f", attempt {attempt}" if len(stage.pods) > 1 else "") + " <=="


def _new_lines(kubeflow: Kubeflow, run: Any, stage: Stage, pod: str, num_shown: dict[str, int]) -> list[str]:
    """Return the whole lines that a pod has printed since the last time; Kubeflow's own only where there are none."""
    if not pod or num_shown.get(pod) == _ALL:
        return []
    try:
        text = _log(kubeflow, run, stage, pod)
    except RetryableError:
        if run.state in FINISHED:
            raise
        text = None
    if text is None:
        return []
    is_over = _is_over(run, stage, pod)
    whole = text if is_over else text[: text.rfind("\n") + 1]
    shown = _REPORTS.sub("", whole) or (whole if is_over else "")
    new = shown[num_shown.get(pod, 0) :].splitlines()
    num_shown[pod] = _ALL if is_over else len(shown)
    return new


def _why_no_log(kubeflow: Kubeflow, run: Any, stage: Stage, pod: str) -> str:
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
    return pod != stage.pods[-1] or stage.state in FINISHED or run.state in FINISHED


def _events(kubeflow: Kubeflow, pod: str) -> list[dict[str, Any]]:
    with suppress(PipelineError, ValueError, KeyError):  # a refusal is text, not JSON
        try:
            _, text = _ask_ui(kubeflow, "/k8s/pod/events", pod)
        except NotFoundError:  # the address is not that of a UI server
            about = {"field_selector": f"involvedObject.name={pod}"}
            text = _ask_kubernetes(kubeflow, lambda api: api.list_namespaced_event, **about) or ""
        return [each for each in json.loads(text)["items"] if "message" in each]
    return []


def _missing_image(events: Iterable[dict[str, Any]], *, is_over: bool = False) -> str:
    """Return which image a pod waits for, or waited for to its end, and why; empty where it has all of them."""
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

    The address of that artifact is in what other attempts printed.
    """
    try:
        text = _log_of_pod(kubeflow, run, stage, pod)
    except NotFoundError:  # the address is not that of a UI server
        return _ask_kubernetes(kubeflow, lambda api: api.read_namespaced_pod_log, name=pod, container="main")
    if text is None and _is_over(run, stage, pod):
        others = (_log_of_pod(kubeflow, run, stage, each) or "" for each in stage.pods if each != pod)
        address = next(filter(None, map(_EXECUTOR_LOGS.search, others)), None)
        text = address and _stored(kubeflow, address[1], address[2], f"{address[3]}-{stage.pods.index(pod)}")
    return text


def _log_of_pod(kubeflow: Kubeflow, run: Any, stage: Stage, pod: str) -> str | None:
    # The day is part of the archive's path on some installations.
    query = {"runid": run.run_id, "createdat": run.created_at.strftime("%Y-%m-%d")}
    status, text = _ask_ui(kubeflow, "/k8s/pod/logs", pod, **query)
    # Where a log breaks off, the server still answers 200, and appends a line that says so.
    printed, marker, _ = text.partition(_NO_LOG)
    if status == 200 and (printed or not marker):
        return printed
    return _archived_log(kubeflow, run, stage, pod)


def _archived_log(kubeflow: Kubeflow, run: Any, stage: Stage, pod: str) -> str | None:
    """Return a log that Argo has archived; the UI server looks for it under another name of the workflow."""
    # The path has the day on which the workflow was created: after the run itself, perhaps past midnight, or by Retry.
    changes = [each.update_time for each in run.state_history or [] if each.update_time]
    moments = (run.created_at, run.created_at + timedelta(minutes=5), *changes)
    days = dict.fromkeys(f"{moment:%Y/%m/%d}" for moment in moments)
    keys = (f"private-artifacts/{kubeflow.namespace}/{stage.workflow}/{day}/{pod}/main.log" for day in days)
    return next((text for text in (_stored(kubeflow, *_STORE, key) for key in keys) if text is not None), None)


def _ask_kubernetes(kubeflow: Kubeflow, method: Callable[[Any], Any], **arguments: str) -> str | None:
    from kubernetes.client import ApiException, CoreV1Api
    from urllib3.exceptions import HTTPError

    from components.cluster.kube import connect

    try:
        ask = method(CoreV1Api(connect()))
        answer = ask(namespace=kubeflow.namespace, _preload_content=False, **arguments)
    except (ApiException, HTTPError, PipelineError) as error:
        if getattr(error, "status", None) in (400, 404):
            return None
        raise PipelineError(f"{kubeflow.endpoint}: has no /k8s/pod/logs; pass the address of the UI") from error
    return str(answer.data.decode("utf-8", errors="replace"))


def _stored(kubeflow: Kubeflow, provider: str, bucket: str, key: str) -> str | None:
    query = {"source": provider, "namespace": kubeflow.namespace, "bucket": bucket, "key": key}
    status, text = _ask(kubeflow, "/artifacts/get", query)
    return text if status == 200 else None


def _ask_ui(kubeflow: Kubeflow, path: str, pod: str, **query: str) -> tuple[int, str]:
    return _ask(kubeflow, path, {"podname": pod, "podnamespace": kubeflow.namespace, **query})


def _ask(kubeflow: Kubeflow, path: str, query: dict[str, str]) -> tuple[int, str]:
    """Return status and text of the UI server, also of its own refusals; NotFoundError at another address."""
    try:
        return 200, kubeflow.get(path, query).decode("utf-8", errors="replace")
    except PipelineError as error:
        status, refusal = getattr(error.__cause__, "status", 0), str(getattr(error.__cause__, "body", None) or "")
        if status in (404, 500) and not refusal.lstrip().startswith(("{", "<")):
            return status, refusal
        raise
