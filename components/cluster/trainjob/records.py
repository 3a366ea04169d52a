"""What is kept of a training job beyond its life in the cluster: manifest, events, and the end of every log."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError

from components.cluster.job import Job
from components.cluster.trainjob.objects import Objects
from components.cluster.trainjob.watch import Seen
from components.shared import jsonl

Json = dict[str, Any]

_TAIL_LINES = 1000
_TRIES = 3


def tails_of(objects: Objects, job: Job, seen: Seen, first: Sequence[str]) -> dict[str, list[str]]:
    """Return the ends of logs by where they are from: of each pod, and of each rank that prints into a file.

    `first` is what was read of the first rank's log, which may be gone with its pod.
    """
    found = {"rank 0": list(first)}
    for pod in seen.pods:
        for container in pod["spec"]["containers"]:
            name = pod["metadata"]["name"]
            lines = _had(lambda name=name, container=container: _tail(objects, name, container["name"]))  # type: ignore[misc]
            found |= {name: lines} if lines else {}
    for rank in range(1, job.num_processes):
        if job.log(rank).is_file():
            found[f"rank {rank}"] = (
                job.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
            )
    return found


def keep(folder: Path, objects: Objects, job: Job, seen: Seen, tails: Mapping[str, Sequence[str]]) -> Path:
    """Write down what was seen of a job; return the folder of this attempt, the first of which is attempt-1."""
    number = 1 + len(list(folder.glob("attempt-*")))
    kept = folder / f"attempt-{number}"
    kept.mkdir(parents=True)
    jsonl.write_json(kept / "trainjob.json", seen.job)
    jsonl.write_json(kept / "pods.json", seen.pods)
    events = [event for each in (seen.job, *seen.pods) for event in _had(lambda each=each: objects.events(each)) or ()]  # type: ignore[misc]
    jsonl.write_json(kept / "events.json", events)
    for where, lines in tails.items():
        (kept / f"{where.replace(' ', '-')}.log").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for path in job.folder.glob("*.json"):
        shutil.copy(path, kept / path.name)
    return kept


def _tail(objects: Objects, pod: str, container: str) -> list[str]:
    response = objects.log(pod, container, follow=False, tail=_TAIL_LINES)
    text: str = response.data.decode(errors="replace")
    return [line.partition(" ")[2] for line in text.splitlines()]


def _had(ask: Callable[[], list[Any]]) -> list[Any] | None:
    """Return what can be had of the cluster: nothing is decided by it."""
    for _ in range(_TRIES):
        with suppress(client.ApiException, HTTPError):
            return ask()
    return None
