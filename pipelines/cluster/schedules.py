"""Runs at set times: one schedule for a name, with one run at a time.

Kubeflow deletes what a schedule has started together with the schedule, also while it runs, and its API takes such a
run for running for ever. So a schedule is disabled first, and deleted once none of its runs is unfinished.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from components.shared import lineage
from components.shared.errors import PipelineError, RetryableError
from pipelines.cluster import cron
from pipelines.cluster.kubeflow import Kubeflow, readable_errors
from pipelines.cluster.logs import is_lost
from pipelines.cluster.runs import Package, stop
from pipelines.cluster.stages import FINISHED

ENABLED_AGAIN = "enabled again"
_ENABLED = "ENABLED"
_DIGEST = re.compile(r"digest ([0-9a-f]{64})")


@dataclass(frozen=True)
class Schedule:
    """What a schedule runs, and when."""

    name: str
    cron: str
    package: Package
    parameters: dict[str, Any]
    experiment: str
    service_account: str | None
    """Of the runs; None for the usual one."""

    @property
    def digest(self) -> str:
        """The digest of everything that would make it another schedule."""
        return lineage.value_digest(
            [self.cron, self.package.digest, self.parameters, self.experiment, self.service_account]
        )


def listed(kubeflow: Kubeflow) -> list[Any]:
    """Return every schedule that this program created, by name."""
    return sorted((each for each in _all(kubeflow) if _digest(each)), key=lambda each: str(each.display_name))


def apply(kubeflow: Kubeflow, schedule: Schedule) -> tuple[str, list[Any]]:
    """Create or update the named schedule; return what that took, and unfinished runs of the previous one.

    A schedule cannot be changed in Kubeflow: a new one is created, and then the old one is removed. Where a run of it
    is unfinished, the old one is left disabled, and the next call removes it.
    """
    known = _named(kubeflow, schedule.name)
    same = [each for each in known if _digest(each) == schedule.digest][:1]
    if not same:
        _create(kubeflow, schedule)
    elif same[0].status != _ENABLED:
        with readable_errors(kubeflow.endpoint):
            kubeflow.client.enable_recurring_run(same[0].recurring_run_id)
    unfinished = [run for each in known if each not in same for run in _retire(kubeflow, each)]
    if not same:
        return "changed" if known else "created", unfinished
    return "unchanged" if same[0].status == _ENABLED else ENABLED_AGAIN, unfinished


def remove(kubeflow: Kubeflow, name: str, *, now: bool = False) -> Iterator[str]:
    """Remove the named schedule, with `now` also its unfinished runs; yield a line about each.

    Raises:
        RetryableError: Runs are unfinished: the schedule is disabled, to be removed once they have ended.
    """
    known = _named(kubeflow, name)
    if not known:
        names = ", ".join(str(each.display_name) for each in listed(kubeflow)) or "none"
        raise PipelineError(f"{name}: no such schedule; there are {names}")
    unfinished = [run for each in known for run in _retire(kubeflow, each)]
    if unfinished and not now:
        runs = ", ".join(f"{run.display_name} ({run.run_id})" for run in unfinished)
        raise RetryableError(
            f"{name}: disabled but not removed, because Kubeflow would delete its unfinished runs with it: {runs}; "
            "remove it again once they have ended, or with --now and lose them"
        )
    for run in unfinished:
        yield from stop(kubeflow, run)
    for each in _named(kubeflow, name):
        _delete(kubeflow, each)
    yield f"{name}  removed"


def _retire(kubeflow: Kubeflow, schedule: Any) -> list[Any]:
    """Delete a schedule if none of its runs is unfinished; otherwise disable it and return those runs."""
    if schedule.status == _ENABLED:
        with readable_errors(kubeflow.endpoint):
            kubeflow.client.disable_recurring_run(schedule.recurring_run_id)
    newer = takewhile(lambda run: run.created_at >= schedule.created_at, kubeflow.runs())
    own = [run for run in newer if run.recurring_run_id == schedule.recurring_run_id]
    unfinished = [kubeflow.run(run.run_id) for run in own if run.state not in FINISHED]
    unfinished = [run for run in unfinished if not is_lost(kubeflow, run)]
    if not unfinished:
        _delete(kubeflow, schedule)
    return unfinished


def _named(kubeflow: Kubeflow, name: str) -> list[Any]:
    """Return the schedules of a name: more than one only where an earlier change was interrupted."""
    named = [each for each in _all(kubeflow) if each.display_name == name]
    if any(not _digest(each) for each in named):
        raise PipelineError(f"{name}: grpo-pipeline did not create the schedule of this name; choose another name")
    return named


def _all(kubeflow: Kubeflow) -> Iterator[Any]:
    return kubeflow.pages(kubeflow.client.list_recurring_runs, "recurring_runs", page_size=100)


def _digest(schedule: Any) -> str | None:
    match = _DIGEST.search(schedule.description or "")
    return match[1] if match else None


def _create(kubeflow: Kubeflow, schedule: Schedule) -> None:
    experiment_id = kubeflow.experiment(schedule.experiment)
    with readable_errors(kubeflow.endpoint):
        kubeflow.client.create_recurring_run(
            experiment_id,
            schedule.name,
            description=f"{cron.describe(schedule.cron)}; created by grpo-pipeline, digest {schedule.digest}",
            cron_expression=schedule.cron,
            max_concurrency=1,
            no_catchup=True,  # of all times that were missed only the latest is caught up
            params=schedule.parameters,
            pipeline_package_path=str(schedule.package.path),
            service_account=schedule.service_account,
        )


def _delete(kubeflow: Kubeflow, schedule: Any) -> None:
    with readable_errors(kubeflow.endpoint):
        kubeflow.client.delete_recurring_run(schedule.recurring_run_id)
