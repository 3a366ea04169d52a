"""Why a job failed or does not start, read from the outcomes of its ranks, its TrainJob, its pods and their logs."""

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from components.cluster.job import Job
from components.shared.errors import PipelineError, RetryableError

Json = dict[str, Any]

_LINES_SHOWN = 20
_LOST_IN_LOG = re.compile(
    r"Watchdog caught collective operation timeout|NCCL (?:error|WARN .*(?:timeout|closed|reset))|ncclRemoteError"
    r"|Connection (?:reset|closed) by (?:remote )?peer|Socket Timeout|RendezvousTimeoutError|NVLink|Xid \(PCI"
)
"""What NCCL, Gloo and drivers print when another process, the network or a GPU is lost."""


class SilentRankError(RetryableError):
    """A rank ended without reporting an error."""


def error_of_ranks(job: Job) -> Exception | None:
    """Return the error that ended a job, or None where no rank has failed, as far as ranks and launchers report.

    A rank's own error goes before its report that another rank is lost.
    """
    outcomes = {rank: job.outcome(rank) for rank in range(job.num_processes)}
    errors = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None and "error" in outcome}
    for rank, outcome in errors.items():
        if outcome["exit_code"] != RetryableError.exit_code:
            return _as_error(job, rank, outcome)
    for rank, code in list(job.exit_codes().items())[:1]:
        if rank not in errors:
            return SilentRankError(f"{_silent_end(rank, code)}; run the same again to go on from the last checkpoint")
        return RetryableError(errors[rank]["error"])
    for outcome in errors.values():
        return RetryableError(outcome["error"])
    return None


def _as_error(job: Job, rank: int, outcome: Mapping[str, str | int]) -> Exception:
    message = str(outcome["error"])
    if outcome.get("errno") is not None:
        return OSError(outcome["errno"], os.strerror(int(outcome["errno"])), outcome["file"])
    if outcome["exit_code"] == PipelineError.exit_code:
        return PipelineError(message)
    log = job.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_SHOWN:] if rank else []
    return RuntimeError("\n".join([f"rank {rank}: {message}", *log]))


def _silent_end(rank: int, code: int) -> str:
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    return f"rank {rank} ended with exit code {code} without reporting an error"


def failure_reason(
    job: Json, pods: Sequence[Json], tails: Mapping[str, Sequence[str]], reported: Exception | None
) -> Exception:
    """Return why a TrainJob failed, in one line; the type says whether to try again.

    Args:
        job: The TrainJob.
        pods: Its pods.
        tails: The ends of their logs, by where they are from.
        reported: What its ranks reported (`error_of_ranks`).
    """
    failed, name = condition(job, "Failed"), job["metadata"]["name"]
    if condition(job, "Complete")["status"] == "True" and reported is None:
        return RetryableError(f"{name}: is complete, but not every rank has left a result on the volume")
    if failed["reason"] == "DeadlineExceeded":
        return PipelineError(
            f"{name}: ran for longer than cluster.training_timeout_s; raise it, or run again to go on from its work"
        )
    silent = [reported] if isinstance(reported, SilentRankError) else []
    errors = [reported] if reported and not silent else []
    final = [error for error in errors if not isinstance(error, RetryableError)]
    # First causes that no rank can report, then what a rank reports, then mere consequences.
    for reason in (
        *_out_of_memory(pods),
        *final,
        *_disrupted(pods),
        *errors,
        *_lost_in_logs(tails),
        *silent,
        *_exit_codes(pods),
    ):
        return reason
    return RetryableError(f"{name}: {failed['message'] or failed['reason'] or 'failed for no given reason'}")


def _out_of_memory(pods: Sequence[Json]) -> Iterator[Exception]:
    for pod, state in _terminated(pods):
        if state.get("reason") == "OOMKilled":
            yield PipelineError(
                f"{_pod_on_node(pod)} ran out of memory (OOMKilled, exit code {state['exitCode']}); "
                "raise cluster.memory_per_node_gib, or reduce memory use: engine.offload, vllm.cache_gib"
            )


def _disrupted(pods: Sequence[Json]) -> Iterator[Exception]:
    for pod in pods:
        status, target = pod["status"], condition(pod, "DisruptionTarget")
        if target["status"] == "True":
            yield RetryableError(f"{_pod_on_node(pod)} was disrupted: {target['reason']}: {target['message']}")
        elif status.get("reason") in ("Evicted", "NodeLost", "Preempting", "Shutdown", "NodeShutdown"):
            yield RetryableError(f"{_pod_on_node(pod)} was disrupted: {status['reason']}: {status.get('message', '')}")


def _lost_in_logs(tails: Mapping[str, Sequence[str]]) -> Iterator[Exception]:
    for where, lines in tails.items():
        for line in lines:
            if _LOST_IN_LOG.search(line):
                yield RetryableError(f"{where}: {line.strip()[:300]}")


def _exit_codes(pods: Sequence[Json]) -> Iterator[Exception]:
    for pod, state in _terminated(pods):
        code = state["exitCode"]
        if code:
            message = f"{_pod_on_node(pod)} ended with exit code {code}"
            # Above 128 it was a signal, whose sender is unknown.
            yield (RetryableError if code == RetryableError.exit_code or code > 128 else PipelineError)(message)


def scheduling_problem(pods: Sequence[Json], events: Sequence[Json]) -> str:
    """Return in one line why pods do not run: from their status, or from the newest warning among events."""
    for pod in pods:
        for state in container_states(pod, "waiting"):
            if state.get("message"):
                return f"{pod['metadata']['name']}: {state['reason']}: {state['message']}"
        scheduled = condition(pod, "PodScheduled")
        if scheduled["status"] == "False":
            return f"{pod['metadata']['name']}: {scheduled['reason']}: {scheduled['message']}"
    warnings = [f"{event['reason']}: {event['message']}" for event in events if event.get("type") == "Warning"]
    return warnings[-1] if warnings else "the cluster gives no reason"


def condition(document: Json, kind: str) -> Json:
    """Return a condition of an object, with status Unknown where it has none of the kind."""
    conditions: list[Json] = document.get("status", {}).get("conditions") or []
    unknown = {"type": kind, "status": "Unknown", "reason": "", "message": ""}
    return next((each for each in conditions if each["type"] == kind), unknown)


def container_states(pod: Json, kind: str) -> list[Json]:
    """Return the states of this kind (waiting, running, terminated) that containers of a pod are in."""
    statuses = pod["status"].get("containerStatuses") or []
    return [status["state"][kind] for status in statuses if kind in status.get("state", {})]


def _terminated(pods: Sequence[Json]) -> list[tuple[Json, Json]]:
    """Return each pod with the state of a container that has ended, in the order in which they did."""
    ended = [(pod, state) for pod in pods for state in container_states(pod, "terminated")]
    return sorted(ended, key=lambda each: str(each[1].get("finishedAt", "")))


def _pod_on_node(pod: Json) -> str:
    name: str = pod["metadata"]["name"]
    return f"{name} on {pod['spec']['nodeName']}" if pod["spec"].get("nodeName") else name
