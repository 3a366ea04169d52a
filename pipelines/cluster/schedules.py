"""Runs at set times: one schedule for a name, with one run at a time.

Kubeflow deletes what a schedule has started together with the schedule, also while it runs, and its API takes such a
run for running for ever. So a schedule is disabled first, and deleted once none of its runs is unfinished.
"""

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import UTC, datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from components.shared.errors import PipelineError, RetryableError
from pipelines.cluster import cron
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.logs import is_lost
from pipelines.cluster.runs import in_words, stop, table
from pipelines.cluster.stages import FINISHED

if TYPE_CHECKING:
    from pipelines.cluster.submission import Package

ENABLED_AGAIN = "enabled again"
_ENABLED = "ENABLED"
_CREATED_BY = "; created by grpo-pipeline, digest "


def listed(kubeflow: Kubeflow) -> list[str]:
    """Return a line for each schedule that this program created."""
    schedules = _ours(kubeflow)
    if not schedules:
        return ["no schedules; `grpo-pipeline schedule apply` creates one"]
    rows = [("schedule", "state", "cron", "meaning", "next")]
    for schedule in schedules:
        text = schedule.trigger.cron_schedule.cron
        next_time = cron.next_times(text, datetime.now(UTC), 1)[0] if schedule.status == _ENABLED else "-"
        rows.append((schedule.display_name, in_words(schedule.status), text, cron.describe(text), next_time))
    return table(rows)


def apply(
    kubeflow: Kubeflow,
    name: str,
    times: str,
    package: "Package",
    parameters: dict[str, Any],
    *,
    experiment: str,
    service_account: str | None,
) -> tuple[str, list[Any]]:
    """Create or update the named schedule; return what that took, and unfinished runs of the previous one.

    A schedule cannot be changed in Kubeflow: a new one is created, and then the old one is removed. Where a run of it
    is unfinished, the old one is left disabled, and the next call removes it.
    """
    from components.shared import lineage

    digest = lineage.value_digest([times, package.digest, parameters, experiment, service_account])
    known = _ours(kubeflow, name)
    same = next((each for each in known if _digest(each) == digest), None)
    outcome = "changed" if known else "created"
    if same is None:
        with redirect_stdout(io.StringIO()):  # the client prints an address of its own
            experiment_id = kubeflow.client.create_experiment(
                experiment, namespace=kubeflow.user_namespace
            ).experiment_id
        kubeflow.client.create_recurring_run(
            experiment_id,
            name,
            description=f"{cron.describe(times)}{_CREATED_BY}{digest}",
            cron_expression=times,
            max_concurrency=1,
            no_catchup=True,  # of all times that were missed only the latest is caught up
            params=parameters,
            pipeline_package_path=str(package.path),
            service_account=service_account,
        )
    elif same.status == _ENABLED:
        outcome = "unchanged"
    else:
        kubeflow.client.enable_recurring_run(same.recurring_run_id)
        outcome = ENABLED_AGAIN
    return outcome, [run for each in known if each is not same for run in _retire(kubeflow, each)]


def remove(kubeflow: Kubeflow, name: str, *, now: bool = False) -> Iterator[str]:
    """Remove the named schedule, with `now` also its unfinished runs; yield a line about each.

    Raises:
        RetryableError: Runs are unfinished: the schedule is disabled, to be removed once they have ended.
    """
    known = _ours(kubeflow, name)
    if not known:
        names = ", ".join(str(each.display_name) for each in _ours(kubeflow)) or "none"
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
    for each in _ours(kubeflow, name):
        kubeflow.client.delete_recurring_run(each.recurring_run_id)
    yield f"{name}  removed"


def _retire(kubeflow: Kubeflow, schedule: Any) -> list[Any]:
    """Delete a schedule if none of its runs is unfinished; otherwise disable it and return those runs."""
    id_ = schedule.recurring_run_id
    if schedule.status == _ENABLED:
        kubeflow.client.disable_recurring_run(id_)
    newer = takewhile(lambda run: run.created_at >= schedule.created_at, kubeflow.runs())
    unfinished = [run.run_id for run in newer if run.recurring_run_id == id_ and run.state not in FINISHED]
    left = [run for run in map(kubeflow.run, unfinished) if not is_lost(kubeflow, run)]
    if not left:
        kubeflow.client.delete_recurring_run(id_)
    return left


def _ours(kubeflow: Kubeflow, name: str | None = None) -> list[Any]:
    """Return the schedules that this program created; of one name more than one where a change was interrupted."""
    every = kubeflow.pages(kubeflow.client.list_recurring_runs, "recurring_runs", page_size=100)
    schedules = [each for each in every if name in (None, each.display_name)]
    if name and not all(map(_digest, schedules)):
        raise PipelineError(f"{name}: grpo-pipeline did not create the schedule of this name; choose another name")
    return sorted(filter(_digest, schedules), key=lambda each: str(each.display_name))


def _digest(schedule: Any) -> str:
    """Return the digest of all that makes a schedule another one; empty where somebody else created it."""
    return str((schedule.description or "").partition(_CREATED_BY)[2])
