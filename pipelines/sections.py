"""A params file in the form in which the graph takes it: a parameter per section."""

from pathlib import Path
from typing import Any

from components.shared.config import Params, read_params


def sections(path: Path) -> Params:
    """Return the sections of a params file without the keys that are null, for which KFP has no value."""
    return {name: _without_nulls(section) for name, section in read_params(path).items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
