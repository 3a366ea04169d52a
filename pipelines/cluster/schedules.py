"""Runs at set times: one schedule for a name, brought to what is asked for, with one run at a time.

Kubeflow deletes what a schedule has started together with the schedule, also while it runs, and its API takes such a
run for running for ever. So a schedule is disabled first, and deleted once none of its runs goes on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from components.shared import lineage
from components.shared.errors import PipelineError, RetryableError
from pipelines.cluster.cron import Cron
from pipelines.cluster.cron_words import words
from pipelines.cluster.explained import explained
from pipelines.cluster.logs import is_lost
from pipelines.cluster.package import Package
from pipelines.cluster.runs import Cluster, stop
from pipelines.cluster.tasks import FINISHED

_PAGE = 100
_DIGEST = re.compile(r"digest ([0-9a-f]{64})")
_ENABLED = "ENABLED"
ENABLED_AGAIN = "enabled again"


@dataclass(frozen=True)
class Schedule:
    """What a schedule runs, and when."""

    name: str
    cron: Cron
    package: Package
    parameters: dict[str, Any]
    experiment: str
    account: str | None
    """Service account of the runs; None for the usual one."""

    @property
    def digest(self) -> str:
        """Of all that would make another schedule of it."""
        return lineage.value_digest(
            [self.cron.text, self.package.digest, self.parameters, self.experiment, self.account]
        )

    @property
    def description(self) -> str:
        """What Kubeflow shows, and by which the schedule is known again."""
        return f"{words(self.cron)}; made by grpo-pipeline, digest {self.digest}"


def listed(cluster: Cluster) -> list[Any]:
    """Return every schedule that was made here, by name."""
    return sorted((each for each in _all(cluster) if _digest(each)), key=lambda each: str(each.display_name))


def apply(cluster: Cluster, schedule: Schedule) -> tuple[str, list[Any]]:
    """Bring the schedule of a name to what is asked for; return what that took, and runs of the old one that go on.

    A schedule cannot be changed in Kubeflow: a new one is made, and then the old one is removed. Where a run of it
    goes on, the old one is left disabled, and the next call removes it.
    """
    known = _named(cluster, schedule.name)
    same = [each for each in known if _digest(each) == schedule.digest]
    if not same:
        _create(cluster, schedule)
    elif same[0].status != _ENABLED:
        with explained(cluster.endpoint):
            cluster.client.enable_recurring_run(same[0].recurring_run_id)
    going = [run for each in known if each not in same[:1] for run in _retire(cluster, each)]
    if not same:
        return "changed" if known else "created", going
    return "unchanged" if same[0].status == _ENABLED else ENABLED_AGAIN, going


def remove(cluster: Cluster, name: str, *, now: bool = False) -> Iterator[str]:
    """Remove the schedule of a name and say so; with `now` also runs of it that go on.

    Raises:
        RetryableError: Runs go on: the schedule is disabled, to be removed once they have ended.
    """
    known = _named(cluster, name)
    if not known:
        names = ", ".join(str(each.display_name) for each in listed(cluster)) or "none"
        raise PipelineError(f"{name}: no such schedule; there are {names}")
    going = [run for each in known for run in _retire(cluster, each)]
    if going and not now:
        runs = ", ".join(f"{run.display_name} ({run.run_id})" for run in going)
        raise RetryableError(
            f"{name}: disabled, and not removed yet, since Kubeflow would delete with it what still runs: {runs}; "
            "remove it again once that has ended, or with --now and lose it"
        )
    for run in going:
        yield from stop(cluster, run)
    for each in _named(cluster, name):
        _delete(cluster, each)
    yield f"{name}  removed"


def _retire(cluster: Cluster, schedule: Any) -> list[Any]:
    """Delete a schedule if no run of it goes on; otherwise disable it and return those runs."""
    if schedule.status == _ENABLED:
        with explained(cluster.endpoint):
            cluster.client.disable_recurring_run(schedule.recurring_run_id)
    newer = takewhile(lambda run: run.created_at >= schedule.created_at, cluster.newest())
    of_it = [run for run in newer if run.recurring_run_id == schedule.recurring_run_id]
    unfinished = (cluster.get(run.run_id) for run in of_it if run.state not in FINISHED)
    going = [run for run in unfinished if not is_lost(cluster, run)]
    if not going:
        _delete(cluster, schedule)
    return going


def _named(cluster: Cluster, name: str) -> list[Any]:
    """The schedules of a name: more than one only where an earlier change was interrupted."""
    found = [each for each in _all(cluster) if each.display_name == name]
    if any(not _digest(each) for each in found):
        raise PipelineError(f"{name}: there is a schedule of this name that was not made here; choose another name")
    return found


def _all(cluster: Cluster) -> Iterator[Any]:
    token = ""
    while True:
        with explained(cluster.endpoint):
            page = cluster.client.list_recurring_runs(page_token=token, page_size=_PAGE, namespace=cluster.namespace)
        yield from page.recurring_runs or []
        token = page.next_page_token
        if not token:
            return


def _digest(schedule: Any) -> str | None:
    match = _DIGEST.search(schedule.description or "")
    return match[1] if match else None


def _create(cluster: Cluster, schedule: Schedule) -> None:
    experiment_id = cluster.experiment(schedule.experiment)
    with explained(cluster.endpoint):
        cluster.client.create_recurring_run(
            experiment_id,
            schedule.name,
            description=schedule.description,
            cron_expression=schedule.cron.text,
            max_concurrency=1,
            no_catchup=True,  # of all times that were missed only the latest is made up for
            params=schedule.parameters,
            pipeline_package_path=str(schedule.package.path),
            service_account=schedule.account,
        )


def _delete(cluster: Cluster, schedule: Any) -> None:
    with explained(cluster.endpoint):
        cluster.client.delete_recurring_run(schedule.recurring_run_id)
