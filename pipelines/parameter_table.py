"""Prints docs/parameters.md, which explains every key and the run form: `python -m pipelines.parameter_table`."""

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from components.preflight.config import Params
from components.preflight.form import TYPED_KEYS, parameters
from components.shared.config import SameAs, models_of, shared_keys

_HEADER = """# Parameters

Written by `make compile` from the config models; not to be edited.

A params file has a section per stage and names what differs from the defaults below. `extends: FILE`, relative to its
own folder, lays it over another file: mappings are merged, lists and scalars are replaced, and `null` resets a key to
its default; of several files, `extends: [FILE, FILE]`, the later is laid over the earlier. `grpo-pipeline config
--params FILE` prints a file with everything filled in. The sections `cluster` and `deployment` are for runs on a
cluster.

## The form of a run on a cluster

A parameter stands for a key of the params file; the form opens with its values in the file that was compiled. All other
keys of that file are compiled into the graph, and `overrides` changes them: sections as below, in YAML on one line.
`deployment` is compiled in as well, and is the same for all runs of a version.

| parameter | key | type | meaning |
|---|---|---|---|
"""
_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def page() -> str:
    """Return the page: a table of the form, then a table for each section of a params file."""
    keys = {name: f"`{'.'.join(key)}`" for name, key in TYPED_KEYS.items()}
    rows = []
    for name, parameter in parameters().items():
        rows.append(f"| `{name}` | {keys.get(name, '')} | {_TYPES[parameter.type]} | {parameter.description} |\n")
    return "".join([_HEADER, *rows, *(_section(name, field) for name, field in Params.model_fields.items())])


def _section(name: str, field: FieldInfo) -> str:
    """Return a heading, the docstring of a section's config model, and a table of its keys."""
    (model,) = models_of(field)
    heading = f"\n## {name}\n\n{' '.join((model.__doc__ or '').split())}\n\n"
    rows = [f"| `{key}` | {_default(each)} | {_meaning(each)} |\n" for key, each in _keys(model)]
    return "".join([heading, "| key | default | meaning |\n|---|---|---|\n", *rows])


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the path and the field of each key with a value; the path of a list or of a union has `[]`."""
    shared = shared_keys(model)
    for name, field in model.model_fields.items():
        models = [] if name in shared else models_of(field)
        if len(models) != 1 or field.default is None:  # a section that is always there has no value of its own
            yield f"{prefix}{name}", field
        brackets = "[]" if len(models) > 1 or str(field.annotation).startswith("list") else ""
        nested: dict[str, FieldInfo] = {}
        for each in models:
            for key, nested_field in _keys(each, f"{prefix}{name}{brackets}."):
                nested.setdefault(key, nested_field)  # of a key in several members of a union, the first one counts
        yield from nested.items()


def _default(field: FieldInfo) -> str:
    """Return the default of a key as Markdown, or the key of another section that it follows."""
    source = next((mark for mark in field.metadata if isinstance(mark, SameAs)), None)
    if source:
        return f"`{source.section}.{source.key}`"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    is_plain_text = isinstance(value, str) and value.isprintable()
    return f"`{value if is_plain_text else json.dumps(to_jsonable_python(value))}`"


def _meaning(field: FieldInfo) -> str:
    """Return the docstring of a key as the cell of a table, and its accepted values if they are listed in its type."""
    text = " ".join((field.description or "").split()).replace("|", "\\|")
    choices: tuple[object, ...] = ()
    if get_origin(field.annotation) is Literal:
        choices = get_args(field.annotation)
    elif isinstance(field.annotation, type) and issubclass(field.annotation, StrEnum):
        choices = tuple(field.annotation)
    if len(choices) < 2:  # a Literal with one value is the kind of an entry in a union
        return text
    return f"{text} One of {', '.join(f'`{each}`' for each in choices)}.".strip()


if __name__ == "__main__":
    print(page(), end="")
