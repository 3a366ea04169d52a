"""Runs at set times: one schedule for a name, brought to what is asked for, never two at once, none made up for."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from components.shared import lineage
from components.shared.errors import PipelineError
from pipelines.cluster.cron import Cron
from pipelines.cluster.cron_words import words
from pipelines.cluster.explained import explained
from pipelines.cluster.package import Package
from pipelines.cluster.runs import Cluster

_PAGE = 100
_DIGEST = re.compile(r"digest ([0-9a-f]{64})")
_ENABLED = "ENABLED"


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


def apply(cluster: Cluster, schedule: Schedule) -> str:
    """Bring the schedule of a name to what is asked for and say what that took.

    A schedule cannot be changed in Kubeflow: a new one is made, and then the old one is removed.
    """
    known = _named(cluster, schedule.name)
    same = [each for each in known if _digest(each) == schedule.digest]
    if not same:
        _create(cluster, schedule)
    elif same[0].status != _ENABLED:
        with explained(cluster.endpoint):
            cluster.client.enable_recurring_run(same[0].recurring_run_id)
    for each in known:
        if each not in same[:1]:
            _delete(cluster, each)
    if not same:
        return "changed" if known else "created"
    return "unchanged" if same[0].status == _ENABLED else "enabled again"


def remove(cluster: Cluster, name: str) -> None:
    """Remove the schedule of a name; runs that it has started go on."""
    known = _named(cluster, name)
    if not known:
        names = ", ".join(str(each.display_name) for each in listed(cluster)) or "none"
        raise PipelineError(f"{name}: no such schedule; there are {names}")
    for each in known:
        _delete(cluster, each)


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
            no_catchup=True,  # or each slot that was missed would be run, one after the other
            params=schedule.parameters,
            pipeline_package_path=str(schedule.package.path),
            service_account=schedule.account,
        )


def _delete(cluster: Cluster, schedule: Any) -> None:
    with explained(cluster.endpoint):
        cluster.client.delete_recurring_run(schedule.recurring_run_id)
