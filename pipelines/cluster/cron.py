"""Cron expressions as Kubeflow Pipelines reads them: six fields, seconds first, in UTC."""

import re
from datetime import UTC, datetime
from itertools import islice

from components.shared.errors import PipelineError

_SIX = "six fields are needed: second minute hour day-of-month month day-of-week"
_MONTHS = "JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC"
_WEEKDAYS = "SUN MON TUE WED THU FRI SAT"
_FIELDS = (
    ("second", 0, 59, ""),
    ("minute", 0, 59, ""),
    ("hour", 0, 23, ""),
    ("day of month", 1, 31, ""),
    ("month", 1, 12, _MONTHS),
    ("day of week", 0, 6, _WEEKDAYS),
)
_ITEM = re.compile(r"(?:[*?]|(\w+)(?:-(\w+))?)(?:/0*[1-9]\d*)?")


def check(text: str) -> None:
    """Refuse an expression that is wrong, or would mean something else than it seems to.

    Raises:
        PipelineError: With what would be accepted.
    """
    from croniter import CroniterBadDateError, CroniterError, croniter

    _check_fields(text, text.split())
    try:
        _, _, days, _, weekdays, _ = croniter.expand(_standard(text), second_at_beginning=True)[0]
        next_times(text, datetime(2000, 1, 1, tzinfo=UTC), 1)
    except CroniterBadDateError:
        raise PipelineError(f'cron "{text}": there is no such date; it would never fire') from None
    except CroniterError as error:
        raise PipelineError(f'cron "{text}": {error}') from None
    if days != ["*"] and weekdays != ["*"]:
        raise PipelineError(f'cron "{text}": a day of month and a day of week would fire on either; leave one at *')


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


def _check_fields(text: str, parts: list[str]) -> None:
    if len(parts) != len(_FIELDS):
        raise PipelineError(f'cron "{text}": {_wrong_length(parts)}')
    for part, (name, low, high, names) in zip(parts, _FIELDS, strict=True):
        for item in part.split(","):
            if not _is_item(item, low, high, names.split()):
                accepted = f"numbers from {low} to {high}" + (f", or {', '.join(names.split())}" if names else "")
                raise PipelineError(f'cron "{text}": {name}: {item!r} is not among {accepted}, as in 5, 1-5, 1,3, */2')
    if not parts[0].isdigit():
        raise PipelineError(f'cron "{text}": the first field is the second and must be one number, such as 0')


def _standard(text: str) -> str:
    """Return the expression without question marks, which Kubeflow takes for stars."""
    return text.replace("?", "*")


def _is_item(item: str, low: int, high: int, names: list[str]) -> bool:
    match = _ITEM.fullmatch(item)
    if match is None:
        return False
    values = [names.index(each.upper()) + low if each.upper() in names else each for each in match.groups() if each]
    numbers = [int(each) if str(each).isdigit() else -1 for each in values]
    return all(low <= number <= high for number in numbers) and numbers == sorted(numbers)


def _wrong_length(parts: list[str]) -> str:
    if len(parts) == 5:
        return f'{_SIX}; what other crons write with these five is "0 {" ".join(parts)}"'
    if len(parts) == 1 and parts[0].startswith("@"):
        return f'{_SIX}; every day at midnight, for example, is "0 0 0 * * *"'
    return f"{_SIX}; there are {len(parts)}"
