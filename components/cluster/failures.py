"""Why a job failed or does not start, read from the outcomes of its ranks, its TrainJob, its pods and their logs."""

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
_IN_WORDS = {
    "memory does not suffice": "out of memory|Cannot allocate memory|No available memory|Free memory|KV cache memory",
    "there is no such model": "not a valid model identifier|does not appear to have a file|Repository Not Found",
}
"""What errors of vLLM, torch and transformers mean."""
_ERROR = re.compile(r"(?:^|[\s\])])((?:\w+\.)*\w*(?:Error|Exception): .*\S|error: .*\S)")
"""How Python and this project's programs name an error; vLLM puts the process and the time before it."""


class SilentRankError(RetryableError):
    """A rank ended without reporting an error."""


def error_of_ranks(job: Job) -> Exception | None:
    """Return the error that ended a job, a rank's own before that of a lost one; None where no rank has failed."""
    outcomes = {rank: job.outcome(rank) or {} for rank in range(job.num_processes)}
    errors = {rank: outcome for rank, outcome in outcomes.items() if "error" in outcome}
    for rank, outcome in errors.items():
        if outcome["exit_code"] != RetryableError.exit_code:
            return _as_error(job, rank, outcome)
    first = next(iter(job.exit_codes().items()), None)
    if first is None or first[0] in errors:
        lost = [errors[first[0]]] if first else list(errors.values())
        return RetryableError(lost[0]["error"]) if lost else None
    rank, code = first
    how = f"ended with exit code {code} without reporting an error"
    if code < 0:
        how = f"was killed by {_SIGNALS.get(-code, f'signal {-code}')}"
    return SilentRankError(f"rank {rank} {how}; start the same run again to resume from the last checkpoint")


def _as_error(job: Job, rank: int, outcome: Mapping[str, Any]) -> Exception:
    if outcome.get("errno") is not None:
        return OSError(outcome["errno"], os.strerror(outcome["errno"]), outcome["file"])
    if outcome["exit_code"] == PipelineError.exit_code:
        return PipelineError(outcome["error"])
    log = job.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_SHOWN:] if rank else []
    return RuntimeError("\n".join([f"rank {rank}: {outcome['error']}", *log]))


def failure_reason(
    job: Json, pods: Sequence[Json], tails: Mapping[str, Sequence[str]], reported: Exception | None
) -> Exception:
    """Return the error that tells why a TrainJob failed, from the sign that says most.

    `tails` are the ends of logs by where they are from; `reported` is what ranks reported (`error_of_ranks`).
    """
    failed, name = condition(job, "Failed"), job["metadata"]["name"]
    if condition(job, "Complete")["status"] == "True" and reported is None:
        return RetryableError(f"{name}: is complete, but not every rank has left a result on the volume")
    if failed["reason"] == "DeadlineExceeded":
        return PipelineError(
            f"{name}: ran for longer than cluster.training_timeout_s; raise it, or start the run again to resume"
        )
    every = [(pod, state) for pod in pods for state in container_states(pod, "terminated")]
    ended = sorted(every, key=lambda each: str(each[1].get("finishedAt", "")))
    out_of_memory = [
        PipelineError(
            f"{pod_on_node(pod)} ran out of memory (OOMKilled, exit code {state['exitCode']}); "
            "raise cluster.memory_per_node_gib, or reduce memory use: engine.offload, vllm.cache_gib"
        )
        for pod, state in ended
        if state.get("reason") == "OOMKilled"
    ]
    is_final = reported is not None and not isinstance(reported, RetryableError)
    is_silent = isinstance(reported, SilentRankError)
    # First causes that no rank can report, then what a rank reports, then mere consequences.
    reasons = [
        *out_of_memory,
        *([reported] if is_final else []),
        *(RetryableError(f"{pod_on_node(pod)} was disrupted: {why}") for pod in pods if (why := _disruption(pod))),
        *([] if is_silent else [reported]),
        *(
            RetryableError(f"{where}: {line.strip()[:_LONGEST]}")
            for where, lines in tails.items()
            for line in lines
            if _LOST_IN_LOG.search(line)
        ),
        reported,
        *(_exit(pod, state["exitCode"], tails) for pod, state in ended if state["exitCode"]),
        RetryableError(f"{name}: {failed['message'] or failed['reason'] or 'failed for no given reason'}"),
    ]
    return next(reason for reason in reasons if reason is not None)


def _disruption(pod: Json) -> str:
    status, target = pod["status"], condition(pod, "DisruptionTarget")
    if target["status"] == "True":
        return f"{target['reason']}: {target['message']}"
    return f"{status['reason']}: {status.get('message', '')}" if status.get("reason") in _DISRUPTED else ""


def _exit(pod: Json, code: int, tails: Mapping[str, Sequence[str]]) -> Exception:
    # Above 128 it was a signal, whose sender is unknown.
    error = RetryableError if code == RetryableError.exit_code or code > 128 else PipelineError
    cause = first_error(tails.get(pod["metadata"]["name"], ()))
    return error(f"{pod_on_node(pod)} ended with exit code {code}" + (f": {cause}" if cause else ""))


def pod_on_node(pod: Json) -> str:
    """Return a pod's name, with its node where it has one."""
    name: str = pod["metadata"]["name"]
    return f"{name} on {pod['spec']['nodeName']}" if pod["spec"].get("nodeName") else name


def scheduling_problem(pods: Sequence[Json], events: Sequence[Json]) -> str:
    """Return in one line why pods do not run: from their status, or from the newest warning among events."""
    for pod in pods:
        scheduled = condition(pod, "PodScheduled")
        causes = [state for state in container_states(pod, "waiting") if state.get("message")]
        causes += [scheduled] if scheduled["status"] == "False" else []
        if causes:
            return f"{pod['metadata']['name']}: {causes[0]['reason']}: {causes[0]['message']}"
    warnings = [f"{event['reason']}: {event['message']}" for event in events if event.get("type") == "Warning"]
    return warnings[-1] if warnings else "the cluster gives no reason"


def queueing_problem(workload: Json | None, position: int | None) -> str:
    """Return in one line what a job waits for in its queue: how many are before it, and Kueue's own reasons."""
    if workload is None:
        return "Kueue has not noticed it yet"
    ahead = [] if position is None else [f"position {position + 1} in its ClusterQueue"]
    causes = [
        condition(workload, kind)
        for kind, status in (("QuotaReserved", "False"), ("Evicted", "True"))
        if condition(workload, kind)["status"] == status
    ]
    checks = workload.get("status", {}).get("admissionChecks") or []
    waiting = [f"{each['name']} is {each['state']}: {each['message']}" for each in checks if each["state"] != "Ready"]
    lines = [*ahead, *(f"{each['reason']}: {each['message']}" for each in causes), *waiting]
    return "; ".join(lines) or "Kueue gives no reason"


def first_error(lines: Sequence[str]) -> str:
    """Return the cause that a log names: a known one in plain words, else its first error; empty where it has none."""
    if library := next(filter(None, map(_LIBRARY.search, lines)), None):  # a warning names it, and errors follow
        return f"the image lacks the library {library[1]}"
    error = next((named[1][:_LONGEST] for named in map(_ERROR.search, lines) if named), "")
    return next((f"{words}: {error}" for words, pattern in _IN_WORDS.items() if re.search(pattern, error)), error)


def ended_early(pod: Json) -> Json | None:
    """Return the state in which a container of a pod has failed; None for pods that are deleted or disrupted."""
    if "deletionTimestamp" in pod["metadata"] or _disruption(pod):
        return None
    return next((state for state in container_states(pod, "terminated") if state["exitCode"]), None)


def condition(document: Json, kind: str) -> Json:
    """Return a condition of an object, with status Unknown where it has none of the kind."""
    conditions: list[Json] = document.get("status", {}).get("conditions") or []
    unknown = {"type": kind, "status": "Unknown", "reason": "", "message": ""}
    return next((each for each in conditions if each["type"] == kind), unknown)


def container_states(pod: Json, kind: str) -> list[Json]:
    """Return the states of this kind (waiting, running, terminated) that containers of a pod are in."""
    statuses = pod["status"].get("containerStatuses") or []
    return [status["state"][kind] for status in statuses if kind in status.get("state", {})]
