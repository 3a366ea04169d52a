"""What a cron expression means, in words and in times."""

import calendar
from collections.abc import Iterable
from datetime import datetime
from itertools import islice

from pipelines.cluster.cron import Cron

_WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONTHS = tuple(calendar.month_name)[1:]
_SOME = 6
"""Times of a day that are still listed one by one."""


def words(cron: Cron) -> str:
    """Say when a schedule fires, such as `at 02:00 UTC on Monday`."""
    return " ".join(part for part in (_time(cron), _day(cron), _month(cron)) if part)


def next_times(cron: Cron, after: datetime, count: int = 5) -> list[str]:
    """The next times at which a schedule fires, such as `Mon 2026-11-23 02:00:00 UTC`."""
    return [time.strftime("%a %Y-%m-%d %H:%M:%S UTC") for time in islice(cron.times(after), count)]


def _time(cron: Cron) -> str:
    second = f":{cron.second:02}" if cron.second else ""
    if len(cron.hours) * len(cron.minutes) <= _SOME:
        times = [f"{hour:02}:{minute:02}{second}" for hour in sorted(cron.hours) for minute in sorted(cron.minutes)]
        return f"at {_listed(times)} UTC"
    minutes = "every minute" if len(cron.minutes) == 60 else f"at minute {_listed(map(str, sorted(cron.minutes)))}"
    hours = "of every hour" if len(cron.hours) == 24 else f"of hour {_listed(map(str, sorted(cron.hours)))} UTC"
    return f"{minutes} {hours}" + (f", {cron.second} s past it" if cron.second else "")


def _day(cron: Cron) -> str:
    if len(cron.weekdays) < 7:
        return f"on {_listed(_WEEKDAYS[day] for day in sorted(cron.weekdays))}"
    return "every day" if len(cron.days) == 31 else f"on day {_listed(map(str, sorted(cron.days)))} of the month"


def _month(cron: Cron) -> str:
    return "" if len(cron.months) == 12 else f"in {_listed(_MONTHS[month - 1] for month in sorted(cron.months))}"


def _listed(items: Iterable[str]) -> str:
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last
