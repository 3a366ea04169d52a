"""The whole params file as one typed object, checked before anything runs."""

from pathlib import Path

from components.preflight.config import Params
from components.shared.config import problems, read_params
from components.shared.errors import refuse_all

__all__ = ["Params", "load"]


def load(path: Path) -> Params:
    """Return the validated params in a file; a PipelineError names all that is wrong with them."""
    values = read_params(path)
    refuse_all(problems(Params, values, name="", path=path))
    return Params.model_validate(values)
