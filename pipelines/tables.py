"""Output of the commands: tables, labelled lines, JSON, and settings that differ from their defaults."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

LABEL_WIDTH = 13


def print_labelled(label: str, lines: Iterable[str]) -> None:
    """Print lines in a column, with a label before the first."""
    for number, line in enumerate(lines):
        print(f"{label if number == 0 else '':<{LABEL_WIDTH - 1}} {line}", flush=True)


def aligned(rows: Sequence[Sequence[str]], *, left: int | None = None) -> str:
    """Return rows as lines of aligned columns; with `left`, columns after the first `left` are right-aligned."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        is_left = left is None or number < left
        columns.append([cell.ljust(width) if is_left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def listed(items: Sequence[str], limit: int = 5) -> str:
    """Return the first `limit` items in one line, with an ellipsis if there are more."""
    return ", ".join(items[:limit]) + (", ..." if len(items) > limit else "")


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, ensure_ascii=False, indent=2))


def changed_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings, JSON values by `stage.key`, that differ from the defaults of this code."""
    from components.preflight.config import STAGES, Params

    defaults: dict[str, str] = {}
    for stage in STAGES:
        defaults |= dict(_defaults(stage, Params.model_fields[stage].annotation))
    return {key: value for key, value in settings.items() if defaults.get(key) != value}


def changes(*columns: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the keys whose values differ, with a value per column."""
    from components.shared.execution import ABSENT  # slow to import

    keys = dict.fromkeys(key for column in columns for key in column)
    values_by_key = {key: [column.get(key, ABSENT) for column in columns] for key in keys}
    return {key: values for key, values in values_by_key.items() if len(set(values)) > 1}


def setting_changes(*columns: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the changes of settings by dotted key; a section that a column lacks, or has as null, is one value."""
    from components.shared.execution import ABSENT

    changed = changes(*columns)
    # Where one column has `a` and another one `a.b`, only `a` is shown.
    outermost = [key for key in changed if not any(key.startswith(f"{other}.") for other in changed)]
    return {key: [column.get(key) or _section(column, key) or ABSENT for column in columns] for key in outermost}


def change_lines(changed: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each key with its values, or `same`."""
    return [f"{key}: {' -> '.join(values)}" for key, values in changed.items()] or ["same"]


def _section(settings: Mapping[str, str], key: str) -> str:
    """Return the settings below `key` with their values; empty if there are none."""
    start = f"{key}."
    below = [f"{name.removeprefix(start)} {each}" for name, each in settings.items() if name.startswith(start)]
    return f"{{{', '.join(below)}}}" if below else ""


def _defaults(name: str, model: Any) -> Iterator[tuple[str, str]]:
    """Yield `name.key` and the default as JSON, for each key of a config model that has a default."""
    from pydantic_core import to_jsonable_python

    from components.shared.config import Config
    from components.shared.lineage import flat

    for key, field in model.model_fields.items():
        if not field.is_required():
            yield from flat(f"{name}.{key}", to_jsonable_python(field.get_default(call_default_factory=True)))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            yield from _defaults(f"{name}.{key}", field.annotation)
