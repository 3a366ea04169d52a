"""Runs at set times: one schedule for a name, with one run at a time.

Cron expressions are those of Kubeflow Pipelines: six fields, seconds first, in UTC.

With a schedule, Kubeflow deletes the pods of its runs, even of unfinished ones, which its API then reports as running
for ever. So a schedule is disabled first, and deleted once none of its runs is unfinished.

Kubeflow compiles a schedule when it is created, with the driver and the launcher of its release at that time. So after
an upgrade a schedule has to be created again.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice, takewhile
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from components.shared.errors import PipelineError, RetryableError
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.cluster.logs import is_lost
from pipelines.cluster.runs import in_words, stop
from pipelines.cluster.stages import FINISHED, LONGEST_DESCRIPTION
from pipelines.tables import aligned

if TYPE_CHECKING:
    from pipelines.cluster.submission import Package

_ENABLED = "ENABLED"
_ACCEPTED = 'second minute hour day-of-month month day-of-week, such as "0 0 2 * * 1"'
_CREATED_BY = re.compile(r"; created by grpo-pipeline(?: on Kubeflow Pipelines (\S+))?, digest (\w+)$")


def listed(kubeflow: Kubeflow) -> list[str]:
    """Return a line for each schedule, whoever made it."""
    schedules = kubeflow.schedules()
    if not schedules:
        return ["no schedules; `grpo-pipeline schedule apply` creates one"]
    rows = [("schedule", "state", "cron", "meaning", "next", "compiled by")]
    for each in schedules:
        rows.append((each.display_name, in_words(each.status), *_times(each), _compiled_by(kubeflow, each)))
    return aligned(rows).splitlines()


def apply(
    kubeflow: Kubeflow,
    name: str,
    cron: str,
    package: "Package",
    parameters: Any,
    about: str,
    experiment: str,
    account: str | None,
) -> tuple[str, list[Any]]:
    """Create or update the named schedule; return what was done, and unfinished runs of the schedules it replaces.

    Kubeflow cannot change a schedule: a new one is created, and then the old one is removed. If a run of it is
    unfinished, the old one is only disabled, and the next call removes it.
    """
    from components.shared import lineage

    digest = lineage.value_digest([cron, package.digest, parameters, experiment, account])
    existing = _named(kubeflow, name)
    if not all(map(_digest, existing)):
        raise PipelineError(f"{name}: grpo-pipeline did not create the schedule of this name; choose another name")
    unchanged = [each for each in existing if _digest(each) == digest]
    kept = next((each for each in unchanged if not _is_outdated(kubeflow, each)), None)
    if kept is None:
        outcome = "changed" if existing else "created"
        if unchanged:
            outcome = f"created again, compiled by Kubeflow Pipelines {kubeflow.version}"
        kubeflow.client.create_recurring_run(
            kubeflow.experiment_id(experiment),
            name,
            description=_description(about, cron, kubeflow.version, digest),
            cron_expression=cron,
            max_concurrency=1,
            no_catchup=True,  # after an outage, one run makes up for all missed times
            params=parameters,
            pipeline_package_path=str(package.path),
            service_account=account,
        )
    elif kept.status == _ENABLED:
        outcome = "unchanged"
    else:
        kubeflow.client.enable_recurring_run(kept.recurring_run_id)
        outcome = "enabled again, and at once if a time passed while it was disabled"
    return outcome, [run for each in existing if each is not kept for run in _retire(kubeflow, each)]


def remove(kubeflow: Kubeflow, name: str, *, now: bool = False) -> Iterator[str]:
    """Remove the schedule with this name or id, with `now` also its unfinished runs; yield a line about each.

    RetryableError if runs are unfinished: the schedule is disabled, and can be removed once they have ended.
    """
    existing = _named(kubeflow, name)
    if not existing:
        names = ", ".join(str(each.display_name) for each in kubeflow.schedules()) or "none"
        raise PipelineError(f"{name}: no such schedule; there are {names}")
    if len(existing) > 1 and not all(map(_digest, existing)):  # somebody else has created one of them
        ids = ", ".join(each.recurring_run_id for each in existing)
        raise PipelineError(f"{name}: several schedules have this name; give the id of one: {ids}")
    unfinished = [run for each in existing for run in _retire(kubeflow, each)]
    if unfinished and not now:
        runs = ", ".join(f"{run.display_name} ({run.run_id})" for run in unfinished)
        raise RetryableError(
            f"{name}: disabled but not removed, because Kubeflow would delete its unfinished runs with it: {runs}; "
            "remove it again once they have ended, or with --now and lose them"
        )
    for run in unfinished:
        yield from stop(kubeflow, run)
    for each in _named(kubeflow, name):
        kubeflow.client.delete_recurring_run(each.recurring_run_id)
    yield f"{name}  removed"


def check_cron(text: str) -> None:
    """Raise PipelineError for an expression that never fires, or that Kubeflow may read in another way than meant."""
    from croniter import CroniterError

    parts = text.split()
    if len(parts) != 6:
        hint = f'; for the usual five fields, write "0 {" ".join(parts)}"' if len(parts) == 5 else ""
        raise PipelineError(f'cron "{text}": six fields are needed: {_ACCEPTED}{hint}')
    if not parts[0].isdigit():
        raise PipelineError(f'cron "{text}": the first field is the second and must be one number, such as 0')
    if not {"*", "?"} & {parts[3], parts[5]}:
        raise PipelineError(f'cron "{text}": a day of month and a day of week would fire on either; leave one at *')
    try:
        next_times(text, datetime(2000, 1, 1, tzinfo=UTC), 1)
    except CroniterError as error:
        raise PipelineError(f'cron "{text}": never fires, or is not valid: {error}; accepted: {_ACCEPTED}') from None


def describe_cron(text: str) -> str:
    """Return when a schedule fires, such as `At 02:00, only on Monday (UTC)`."""
    from cron_descriptor import Options, get_description

    options = Options()
    options.use_24hour_time_format = options.verbose = True
    return f"{get_description(text.replace('?', '*'), options)} (UTC)"  # in Kubeflow both mean the same


def next_times(text: str, after: datetime, count: int = 5) -> list[str]:
    """Return the next times at which a schedule fires, such as `Mon 2026-11-23 02:00:00 UTC`."""
    from croniter import croniter

    times = croniter(text.replace("?", "*"), after.astimezone(UTC), second_at_beginning=True).all_next(datetime)
    return [time.strftime("%a %Y-%m-%d %H:%M:%S UTC") for time in islice(times, count)]


def _retire(kubeflow: Kubeflow, schedule: Any) -> list[Any]:
    """Disable a schedule, and delete it if it has no unfinished runs; return these runs."""
    id_ = schedule.recurring_run_id
    if schedule.status == _ENABLED:
        kubeflow.client.disable_recurring_run(id_)
    newer_runs = takewhile(lambda run: run.created_at >= schedule.created_at, kubeflow.runs())
    candidates = [run.run_id for run in newer_runs if run.recurring_run_id == id_ and run.state not in FINISHED]
    unfinished = [run for run in map(kubeflow.run, candidates) if not is_lost(kubeflow, run)]
    if not unfinished:
        kubeflow.client.delete_recurring_run(id_)
    return unfinished


def _named(kubeflow: Kubeflow, name: str) -> list[Any]:
    """Return the schedules with this name or id; several have one name if a change of it was interrupted."""
    return [each for each in kubeflow.schedules() if name in (each.display_name, each.recurring_run_id)]


def _times(schedule: Any) -> tuple[str, str, str]:
    """Return a schedule's cron text, its meaning in words and its next time; `-` for what is unknown or has none."""
    trigger = schedule.trigger
    if trigger is None or trigger.cron_schedule is None:
        seconds = trigger and trigger.periodic_schedule and trigger.periodic_schedule.interval_second
        return "-", f"every {int(seconds):,} s" if seconds else "-", "-"
    from cron_descriptor import FormatException
    from croniter import CroniterError

    text = trigger.cron_schedule.cron
    try:
        next_time = next_times(text, datetime.now(UTC), 1)[0] if schedule.status == _ENABLED else "-"
        return text, describe_cron(text), next_time
    except (CroniterError, FormatException):  # Kubeflow reads more than these do, such as `@every 1h`
        return text, "-", "-"


def _is_outdated(kubeflow: Kubeflow, schedule: Any) -> bool:
    """Tell whether another release of Kubeflow than the present one has compiled a schedule."""
    return bool(kubeflow.version) and _release(schedule) != kubeflow.version


def _compiled_by(kubeflow: Kubeflow, schedule: Any) -> str:
    if not _digest(schedule):
        return "Kubeflow's page"
    release = _release(schedule) or "unknown"
    return f"{release}, now {kubeflow.version}: apply it again" if _is_outdated(kubeflow, schedule) else release


def _description(about: str, cron: str, release: str, digest: str) -> str:
    """Return the description of a schedule; `about` is shortened if Kubeflow has no room for all of it."""
    server = f" on Kubeflow Pipelines {release}" if release else ""
    ending = f"{describe_cron(cron)}; created by grpo-pipeline{server}, digest {digest}"
    return f"{shorten(about, LONGEST_DESCRIPTION - len(ending) - 2, placeholder=' ...')}; {ending}"


def _release(schedule: Any) -> str:
    """Return the release of Kubeflow that compiled a schedule; empty if unknown."""
    match = _CREATED_BY.search(schedule.description or "")
    return (match[1] if match else None) or ""


def _digest(schedule: Any) -> str:
    """Return the digest of everything that `apply` has given a schedule; empty if another program created it."""
    match = _CREATED_BY.search(schedule.description or "")
    return match[2] if match else ""
