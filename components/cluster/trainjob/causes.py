"""Why a training job has failed: one line for people, and whether the same may work the next time."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from components.cluster.rank_errors import SilentEndError
from components.cluster.trainjob.state import condition, states_of
from components.shared.errors import PipelineError, RetryableError

Json = dict[str, Any]

_RETRYABLE = RetryableError.exit_code
_LOST_IN_LOG = re.compile(
    r"Watchdog caught collective operation timeout|NCCL (?:error|WARN .*(?:timeout|closed|reset))|ncclRemoteError"
    r"|Connection (?:reset|closed) by (?:remote )?peer|Socket Timeout|RendezvousTimeoutError|NVLink|Xid \(PCI"
)
"""What NCCL, Gloo and drivers print when another process, the network or a GPU is lost."""


def cause(job: Json, pods: Sequence[Json], tails: Mapping[str, Sequence[str]], said: Exception | None) -> Exception:
    """Return why a job has failed.

    `tails` are the ends of logs by where they are from; `said` is what its ranks have left of it in files, if anything.
    """
    failed = condition(job, "Failed")
    name = job["metadata"]["name"]
    if condition(job, "Complete")["status"] == "True" and said is None:
        return RetryableError(f"{name}: is complete, but not every rank has left a result on the volume")
    if failed["reason"] == "DeadlineExceeded":
        return PipelineError(
            f"{name}: ran for longer than cluster.training_timeout_s; run again to go on from its work"
        )
    words = [] if said is None or isinstance(said, SilentEndError) else [said]
    fatal = [each for each in words if not isinstance(each, RetryableError)]
    silent = [said] if isinstance(said, SilentEndError) else []
    # First what no rank can say of itself, then what one says, then signs of it.
    for reason in (*_of_memory(pods), *fatal, *_of_nodes(pods), *words, *_of_logs(tails), *silent, *_of_exits(pods)):
        return reason
    return RetryableError(f"{name}: {failed['message'] or failed['reason'] or 'it ended without a word'}")


def _of_memory(pods: Sequence[Json]) -> Iterator[Exception]:
    for pod, state in _ended(pods):
        if state.get("reason") == "OOMKilled":
            yield PipelineError(
                f"{_called(pod)} ran out of memory (OOMKilled, exit code {state['exitCode']}); "
                "raise cluster.memory_per_node_gib, or have less in memory: engine.offload, vllm.cache_gib"
            )


def _of_nodes(pods: Sequence[Json]) -> Iterator[Exception]:
    for pod in pods:
        status = pod["status"]
        disrupted = condition(pod, "DisruptionTarget")
        if disrupted["status"] == "True":
            yield RetryableError(f"{_called(pod)} was taken away: {disrupted['reason']}: {disrupted['message']}")
        elif status.get("reason") in ("Evicted", "NodeLost", "Preempting", "Shutdown", "NodeShutdown"):
            yield RetryableError(f"{_called(pod)} was taken away: {status['reason']}: {status.get('message', '')}")


def _of_logs(tails: Mapping[str, Sequence[str]]) -> Iterator[Exception]:
    for where, lines in tails.items():
        for line in lines:
            if _LOST_IN_LOG.search(line):
                yield RetryableError(f"{where}: {line.strip()[:300]}")


def _of_exits(pods: Sequence[Json]) -> Iterator[Exception]:
    """The exit code of a pod of which nothing else is known: from 128 it was a signal, and its sender is not here."""
    for pod, state in _ended(pods):
        code = state["exitCode"]
        if code == 0:
            continue
        message = f"{_called(pod)} ended with exit code {code}"
        yield RetryableError(message) if code == _RETRYABLE or code > 128 else PipelineError(message)


def _ended(pods: Sequence[Json]) -> list[tuple[Json, Json]]:
    """Each pod with the state of a container that has ended, in the order in which they did."""
    found = [(pod, state) for pod in pods for state in states_of(pod, "terminated")]
    return sorted(found, key=lambda each: str(each[1].get("finishedAt", "")))


def _called(pod: Json) -> str:
    name: str = pod["metadata"]["name"]
    return f"{name} on {pod['spec']['nodeName']}" if pod["spec"].get("nodeName") else name
