"""Cron expressions as Kubeflow Pipelines reads them: six fields, seconds first, in UTC."""

import calendar
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from components.shared.errors import PipelineError

_MONTHS = {name.upper(): number for number, name in enumerate(calendar.month_abbr) if name}
_WEEKDAYS = {name: number for number, name in enumerate(("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"))}
_LONGEST_DAYS = 8 * 366
"""Days within which every date comes, even 29 February around a century."""


@dataclass(frozen=True)
class _Field:
    name: str
    low: int
    high: int
    names: dict[str, int]


_FIELDS = (
    _Field("second", 0, 59, {}),
    _Field("minute", 0, 59, {}),
    _Field("hour", 0, 23, {}),
    _Field("day of month", 1, 31, {}),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of week", 0, 6, _WEEKDAYS),
)


@dataclass(frozen=True)
class Cron:
    """When a schedule fires: the values that each field admits."""

    text: str
    second: int
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""

    def admits(self, day: date) -> bool:
        """Whether the schedule fires on a day."""
        return day.month in self.months and day.day in self.days and day.isoweekday() % 7 in self.weekdays

    def times(self, after: datetime) -> Iterator[datetime]:
        """Every time at which the schedule fires after a moment, in UTC."""
        first = after.astimezone(UTC).date()
        for number in range(_LONGEST_DAYS):
            day = first + timedelta(days=number)
            if self.admits(day):
                yield from (time for time in self._times_of(day) if time > after)

    def _times_of(self, day: date) -> Iterator[datetime]:
        for hour in sorted(self.hours):
            for minute in sorted(self.minutes):
                yield datetime(day.year, day.month, day.day, hour, minute, self.second, tzinfo=UTC)


def parse(text: str) -> Cron:
    """Return what a cron expression of six fields means; PipelineError with what would be accepted."""
    parts = text.split()
    if len(parts) != len(_FIELDS):
        raise PipelineError(f'cron "{text}": {_wrong_length(parts)}')
    values = [_values(text, field, part) for field, part in zip(_FIELDS, parts, strict=True)]
    seconds, minutes, hours, days, months, weekdays = values
    if len(seconds) > 1:
        raise PipelineError(f'cron "{text}": the first field is the second and must be one number, such as 0')
    if len(days) < _size(_FIELDS[3]) and len(weekdays) < _size(_FIELDS[5]):
        raise PipelineError(
            f'cron "{text}": a day of month and a day of week would fire on either; leave one of them at *'
        )
    cron = Cron(text, min(seconds), minutes, hours, days, months, weekdays)
    if not any(cron.admits(date(2000, 1, 1) + timedelta(days=number)) for number in range(366)):
        raise PipelineError(f'cron "{text}": there is no such date; it would never fire')
    return cron


def _wrong_length(parts: list[str]) -> str:
    six = "six fields are needed: second minute hour day-of-month month day-of-week"
    if len(parts) == 5:
        return f'{six}; what other crons write with these five is "0 {" ".join(parts)}"'
    if len(parts) == 1 and parts[0].startswith("@"):
        return f'{six}; every day at midnight, for example, is "0 0 0 * * *"'
    return f"{six}; there are {len(parts)}"


def _size(field: _Field) -> int:
    return field.high - field.low + 1


def _values(text: str, field: _Field, part: str) -> frozenset[int]:
    values: set[int] = set()
    for item in part.split(","):
        span, slash, step_text = item.partition("/")
        low, high = _span(text, field, span, open_ended=bool(slash))
        step = int(step_text) if step_text.isdigit() else 0
        if slash and step == 0:
            raise _refused(text, field, item)
        values.update(range(low, high + 1, step or 1))
    return frozenset(values)


def _span(text: str, field: _Field, span: str, *, open_ended: bool) -> tuple[int, int]:
    """The first and the last value of `*`, `5`, `1-5`; with a step after it, `5` goes on to the end."""
    if span in ("*", "?"):
        return field.low, field.high
    first, dash, last = span.partition("-")
    low = _number(text, field, first)
    high = _number(text, field, last) if dash else field.high if open_ended else low
    if high < low:
        raise _refused(text, field, span)
    return low, high


def _number(text: str, field: _Field, word: str) -> int:
    number = field.names.get(word.upper()) if not word.isdigit() else int(word)
    if number is None or not field.low <= number <= field.high:
        raise _refused(text, field, word)
    return number


def _refused(text: str, field: _Field, item: str) -> PipelineError:
    named = f", or {', '.join(field.names)}" if field.names else ""
    accepted = f"numbers from {field.low} to {field.high}{named}, as in 5, 1-5, 1,3 or */2"
    return PipelineError(f'cron "{text}": {field.name}: {item!r} is not among {accepted}')
