"""The whole params file as one typed object, checked before anything runs."""

from pathlib import Path

from components.preflight.config import Params
from components.shared.config import read_params, validate

__all__ = ["Params", "load"]


def load(path: Path) -> Params:
    """Return the validated params in a file."""
    return validate(Params, read_params(path), name="", path=path)
