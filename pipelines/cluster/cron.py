"""Cron expressions as Kubeflow Pipelines reads them: six fields, seconds first, in UTC."""

import re
from datetime import UTC, datetime
from itertools import islice

from components.shared.errors import PipelineError

_NUM_FIELDS = 6
_VALUE = r"(\d+|[A-Za-z]{3})"
_ITEM = rf"([*?]|{_VALUE}(-{_VALUE})?)(/\d+)?"
_FIELD = re.compile(rf"{_ITEM}(,{_ITEM})*")


def check(text: str) -> None:
    """Refuse an expression that Kubeflow would refuse or take for another than it seems to be, or that never fires.

    Kubeflow itself refuses the few that are left: values out of range and ranges that wrap around.

    Raises:
        PipelineError: With what would be accepted.
    """
    from croniter import CroniterError

    parts = text.split()
    if len(parts) != _NUM_FIELDS:
        others = f'; what other crons write with these five is "0 {" ".join(parts)}"' if len(parts) == 5 else ""
        fields = 'second minute hour day-of-month month day-of-week, such as "0 0 2 * * 1"'
        raise PipelineError(f'cron "{text}": six fields are needed: {fields}{others}')
    for part in parts:
        if not _FIELD.fullmatch(part):
            raise PipelineError(f'cron "{text}": {part!r} is none of *, 5, 1-5, MON-FRI, 1,3, */2')
    if not parts[0].isdigit():
        raise PipelineError(f'cron "{text}": the first field is the second and must be one number, such as 0')
    if not {"*", "?"} & {parts[3], parts[5]}:
        raise PipelineError(f'cron "{text}": a day of month and a day of week would fire on either; leave one at *')
    try:
        next_times(text, datetime(2000, 1, 1, tzinfo=UTC), 1)
    except CroniterError as error:
        raise PipelineError(f'cron "{text}": never fires, or is not valid: {error}') from None


def describe(text: str) -> str:
    """Return when a schedule fires, such as `At 02:00, only on Monday (UTC)`."""
    from cron_descriptor import Options, get_description

    options = Options()
    options.use_24hour_time_format = options.verbose = True
    return f"{get_description(_standard(text), options)} (UTC)"


def next_times(text: str, after: datetime, count: int = 5) -> list[str]:
    """Return the next times at which a schedule fires, such as `Mon 2026-11-23 02:00:00 UTC`."""
    from croniter import croniter

    times = croniter(_standard(text), after.astimezone(UTC), second_at_beginning=True).all_next(datetime)
    return [time.strftime("%a %Y-%m-%d %H:%M:%S UTC") for time in islice(times, count)]


def _standard(text: str) -> str:
    """Return the expression without question marks, which Kubeflow takes for stars."""
    return text.replace("?", "*")
