"""Why a job failed or does not start: from the outcomes of its ranks, its TrainJob, its pods and their logs."""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from components.cluster.job import Job
from components.shared.errors import PipelineError, RetryableError

Json = dict[str, Any]

_LINES_SHOWN, _LONGEST = 20, 300
_SIGNALS = {int(each): each.name for each in signal.Signals}
_LOST_IN_LOG = re.compile(
    r"Watchdog caught collective operation timeout|NCCL (?:error|WARN .*(?:timeout|closed|reset))|ncclRemoteError"
    r"|Connection (?:reset|closed) by (?:remote )?peer|Socket Timeout|RendezvousTimeoutError|NVLink|Xid \(PCI"
)
"""What NCCL, Gloo and drivers print when another process, the network or a GPU is lost."""
_DISRUPTED = ("Evicted", "NodeLost", "Preempting", "Shutdown", "NodeShutdown")
_LIBRARY = re.compile(r"(lib[\w.+-]+): cannot open shared object file")
_PLAIN_WORDS = {
    "memory does not suffice": "out of memory|Cannot allocate memory|No available memory|Free memory|KV cache memory",
    "there is no such model": "not a valid model identifier|does not appear to have a file|Repository Not Found",
}
"""Meaning of errors of vLLM, torch and transformers, each with a pattern of their messages."""
_ERROR = re.compile(r"(?:^|[\s\])])((?:\w+\.)*\w*(?:Error|Exception): .*\S|error: .*\S)")
"""Error lines of Python and of this project's programs; vLLM puts the process and the time before them."""


class SilentRankError(RetryableError):
    """A rank ended without reporting an error."""


def error_of_ranks(job: Job) -> Exception | None:
    """Return the error that ended a job, preferably not retryable; None if no rank has failed."""
    outcomes = {rank: job.outcome(rank) or {} for rank in range(job.num_processes)}
    errors = {rank: outcome for rank, outcome in outcomes.items() if "error" in outcome}
    for rank, outcome in errors.items():
        if outcome["exit_code"] != RetryableError.exit_code:  # with that code it may only report that another was lost
            return _as_error(job, rank, outcome)
    exit_codes = job.exit_codes()
    if not exit_codes and not errors:
        return None
    # The first rank that failed, as its launcher saw it, or any rank with an error if the launcher was killed.
    first = [*exit_codes, *errors][0]
    if first in errors:
        return RetryableError(errors[first]["error"])
    code = exit_codes[first]
    how = f"ended with exit code {code} without reporting an error"
    if code < 0:  # minus the number of a signal
        how = f"was killed by {_SIGNALS.get(-code, f'signal {-code}')}"
    return SilentRankError(f"rank {first} {how}; start the same run again to resume from the last checkpoint")


def _as_error(job: Job, rank: int, outcome: Mapping[str, Any]) -> Exception:
    """Return the error that a rank reported; that of a bug is a RuntimeError with the end of the rank's log."""
    if outcome.get("errno") is not None:
        return OSError(outcome["errno"], os.strerror(outcome["errno"]), outcome["file"])
    if outcome["exit_code"] == PipelineError.exit_code:
        return PipelineError(outcome["error"])
    log = job.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_SHOWN:] if rank else []
    return RuntimeError("\n".join([f"rank {rank}: {outcome['error']}", *log]))


def failure_reason(
    job: Json, pods: Sequence[Json], tails: Mapping[str, Sequence[str]], reported: Exception | None
) -> Exception:
    """Return the best reason for a TrainJob's failure from the ends of its logs and the error that ranks reported."""
    failed, name = condition(job, "Failed"), job["metadata"]["name"]
    if condition(job, "Complete")["status"] == "True" and reported is None:
        return RetryableError(f"{name}: is complete, but not every rank has left a result on the volume")
    if failed["reason"] == "DeadlineExceeded":
        advice = "raise it, or start the run again to resume"
        return PipelineError(f"{name}: ran for longer than cluster.training_timeout_s; {advice}")
    ended = [(pod, state) for pod in pods for state in container_states(pod, "terminated")]
    ended.sort(key=lambda pod_and_state: str(pod_and_state[1].get("finishedAt", "")))
    advice = "raise cluster.memory_per_node_gib, or reduce memory use: engine.offload, vllm.cache_gib"
    out_of_memory = [
        PipelineError(f"{pod_on_node(pod)} ran out of memory (OOMKilled, exit code {state['exitCode']}); {advice}")
        for pod, state in ended
        if state.get("reason") == "OOMKilled"
    ]
    disrupted = [f"{pod_on_node(pod)} was disrupted: {_disruption(pod)}" for pod in pods if _disruption(pod)]
    log_lines = [(where, line) for where, lines in tails.items() for line in lines]
    lost = [f"{where}: {line.strip()[:_LONGEST]}" for where, line in log_lines if _LOST_IN_LOG.search(line)]
    # First causes that no rank can report, then what ranks report, then mere consequences.
    reasons: list[Exception | None] = [
        *out_of_memory,
        None if isinstance(reported, RetryableError) else reported,
        *map(RetryableError, disrupted),
        None if isinstance(reported, SilentRankError) else reported,
        *map(RetryableError, lost),
        reported,
        *(_exit_error(pod, state["exitCode"], tails) for pod, state in ended if state["exitCode"]),
        RetryableError(f"{name}: {failed['message'] or failed['reason'] or 'failed for no given reason'}"),
    ]
    return next(reason for reason in reasons if reason is not None)


def _disruption(pod: Json) -> str:
    """Return why the cluster ended a pod, such as an eviction; empty if it did not."""
    status, target = pod["status"], condition(pod, "DisruptionTarget")
    if target["status"] == "True":
        return f"{target['reason']}: {target['message']}"
    return f"{status['reason']}: {status.get('message', '')}" if status.get("reason") in _DISRUPTED else ""


def _exit_error(pod: Json, code: int, tails: Mapping[str, Sequence[str]]) -> Exception:
    """Return the error for a pod whose container ended with `code`, with the first error in its log if there is one."""
    # Codes above 128 stand for a signal; its sender is unknown, so a retry may help.
    error_type = RetryableError if code == RetryableError.exit_code or code > 128 else PipelineError
    cause = first_error(tails.get(pod["metadata"]["name"], ()))
    return error_type(f"{pod_on_node(pod)} ended with exit code {code}" + (f": {cause}" if cause else ""))


def pod_on_node(pod: Json) -> str:
    """Return a pod's name and that of its node, such as `train-0 on gpu-17`; only its own before it is scheduled."""
    name: str = pod["metadata"]["name"]
    return f"{name} on {pod['spec']['nodeName']}" if pod["spec"].get("nodeName") else name


def scheduling_problem(pods: Sequence[Json], events: Sequence[Json]) -> str:
    """Return in one line why pods do not run: from their status, or from the last warning among `events`."""
    for pod in pods:
        scheduled = condition(pod, "PodScheduled")
        causes = [state for state in container_states(pod, "waiting") if state.get("message")]
        if scheduled["status"] == "False":
            causes.append(scheduled)
        if causes:
            return f"{pod['metadata']['name']}: {causes[0]['reason']}: {causes[0]['message']}"
    warnings = [f"{event['reason']}: {event['message']}" for event in events if event.get("type") == "Warning"]
    return warnings[-1] if warnings else "the cluster gives no reason"


def queueing_problem(workload: Json | None, position: int | None) -> str:
    """Return in one line what a job waits for in its queue: its position (0 is next), and the reasons of Kueue."""
    if workload is None:
        return "Kueue has not noticed it yet"
    reasons = [] if position is None else [f"position {position + 1} in its ClusterQueue"]
    for kind, blocking_status in (("QuotaReserved", "False"), ("Evicted", "True")):
        current = condition(workload, kind)
        if current["status"] == blocking_status:
            reasons.append(f"{current['reason']}: {current['message']}")
    checks = workload.get("status", {}).get("admissionChecks") or []
    reasons += [f"{each['name']} is {each['state']}: {each['message']}" for each in checks if each["state"] != "Ready"]
    return "; ".join(reasons) or "Kueue gives no reason"


def first_error(lines: Sequence[str]) -> str:
    """Return the first error in a log, after its meaning if that is known; empty if the log has no error."""
    log = "\n".join(lines)
    if library := _LIBRARY.search(log):  # a warning that names it precedes the errors that follow from it
        return f"the image lacks the library {library[1]}"
    match = _ERROR.search(log)
    error = match[1][:_LONGEST] if match else ""
    for meaning, pattern in _PLAIN_WORDS.items():
        if re.search(pattern, error):
            return f"{meaning}: {error}"
    return error


def failed_state(pod: Json) -> Json | None:
    """Return the state of a pod's first failed container; None if none failed, or the pod was deleted or disrupted."""
    if "deletionTimestamp" in pod["metadata"] or _disruption(pod):
        return None
    return next((state for state in container_states(pod, "terminated") if state["exitCode"]), None)


def condition(document: Json, kind: str) -> Json:
    """Return an object's condition of a kind, such as "Failed"; one with status Unknown if the object has none."""
    conditions: list[Json] = document.get("status", {}).get("conditions") or []
    unknown = {"type": kind, "status": "Unknown", "reason": "", "message": ""}
    return next((each for each in conditions if each["type"] == kind), unknown)


def container_states(pod: Json, kind: str) -> list[Json]:
    """Return the states of those containers of a pod that are `kind`: waiting, running or terminated."""
    statuses = pod["status"].get("containerStatuses") or []
    return [status["state"][kind] for status in statuses if kind in status.get("state", {})]
