"""Config keys that say where and how fast something is computed, or when to give up, and not what comes out of it."""

from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python


class Operational:
    """Marks such a field of a config, as in `num_processes: Annotated[int, Operational] = Field(gt=0)`.

    That also goes for a limit that only stops a run, such as on what may be without a verdict. A run that is resumed
    with another value of it goes on from the checkpoints that are there.
    """


def without_operational(value: Any) -> Any:
    """Return a config, or what stands in one, as a JSON value that lacks every operational key."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        kept = [name for name, field in fields.items() if Operational not in field.metadata]
        return {name: without_operational(getattr(value, name)) for name in kept}
    if isinstance(value, dict):
        return {str(key): without_operational(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_operational(each) for each in value]
    return to_jsonable_python(value)
