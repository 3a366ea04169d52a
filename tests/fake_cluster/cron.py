"""Which cron expressions Kubeflow's scheduler takes: those of robfig/cron's first version."""

import re

_MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
_DAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
_NAMED = {name: number + 1 for number, name in enumerate(_MONTHS)} | {name: n for n, name in enumerate(_DAYS)}
_BOUNDS = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
"""Seconds, minutes, hours, days of the month, months and days of the week."""
_DESCRIPTORS = {"@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"}
_RANGE = re.compile(r"(\*|\?|\w+)(?:-(\w+))?(?:/(\d+))?")


def is_cron(text: str) -> bool:
    """Whether the server takes an expression. Five fields are taken for six without the last: a trap, not an error."""
    if text in _DESCRIPTORS or re.fullmatch(r"@every \d+(\.\d+)?(ns|us|ms|s|m|h)", text):
        return True
    fields = text.split()
    if len(fields) not in (5, 6):
        return False
    return all(_is_field(field, bounds) for field, bounds in zip(fields, _BOUNDS, strict=False))


def _is_field(field: str, bounds: tuple[int, int]) -> bool:
    return all(_is_range(part, bounds) for part in field.split(","))


def _is_range(part: str, bounds: tuple[int, int]) -> bool:
    found = _RANGE.fullmatch(part)
    if not found:
        return False
    first, last, step = found.groups()
    if step == "0" or (first in "*?" and last):
        return False
    if first in ("*", "?"):
        return True
    numbers = [_number(each) for each in (first, last or first)]
    return bounds[0] <= numbers[0] <= numbers[1] <= bounds[1]


def _number(text: str) -> int:
    return int(text) if text.isdigit() else _NAMED.get(text.upper(), -1)
