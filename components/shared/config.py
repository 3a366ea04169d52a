"""Typed configuration: frozen models, unknown keys refused, errors that name file, line and key.

A params file has a section per stage. `extends: FILE`, relative to its own folder, lays it over another one: mappings
are merged key by key, lists and scalars are replaced, and `null` resets a key to its default.
"""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

from components.shared.errors import PipelineError

Params = dict[str, dict[str, Any]]
KeyPath = tuple[str | int, ...]

_EXTENDS = "extends"
_EXPECTED = "expected one mapping per stage, such as `train_grpo:` with its keys below it"


class Config(BaseModel):
    """What every section of a params file derives from: its keys with their types, bounds, defaults and meaning."""

    # Infinity is within many a bound, and no JSON: lineage could not carry it.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _in_one_order(cls, value: Any) -> Any:
        """Kubeflow hands objects on without an order; sums, columns and lineage must not follow it."""
        return dict(sorted(value.items())) if isinstance(value, dict) else value


ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True)
class SameAs:
    """Marks a key that is that of another section where its own section does not have it.

    As in `model: Annotated[ModelConfig, SameAs("train_sft", "model")]`.
    """

    section: str
    key: str


class Operational:
    """Marks a key that decides where, how fast or how long something is computed, and not what the result is.

    Used as `num_processes: Annotated[int, Operational] = Field(gt=0)`. A run resumed with another value of such a key
    continues from its checkpoints.
    """


def without_operational(value: Any) -> Any:
    """Return a config, or a part of one, as a JSON value without its operational keys."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        names = [name for name, field in fields.items() if Operational not in field.metadata]
        return {name: without_operational(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): without_operational(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_operational(each) for each in value]
    return to_jsonable_python(value)


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML would silently keep the last."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Return the mapping as it is written, if its keys differ."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"key `{key.value}` is a duplicate", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


def read_params(path: Path) -> Params:
    """Return the sections of a params file and of those it extends, without the keys that are null.

    Raises:
        PipelineError: A file is missing or is no YAML, something in it is no section, or it extends itself.
    """
    merged: dict[str, Any] = {}
    for layer in reversed(_layers(path)):
        merged = _merge(merged, layer.sections)
    return {name: _without_nulls(section) for name, section in merged.items() if section is not None}


@dataclass(frozen=True)
class _Layer:
    """One file of a chain of params files."""

    path: Path
    sections: dict[str, Any]


def _layers(path: Path) -> list[_Layer]:
    """A params file, the one it extends, the one that extends, and so on."""
    layers: list[_Layer] = []
    seen: list[Path] = []
    current: Path | None = path
    while current is not None:
        seen.append(current)
        content = _content(current)
        parent = content.pop(_EXTENDS, None)
        layers.append(_Layer(current, _sections(content, current, extends=parent is not None)))
        current = None if parent is None else _parent(parent, seen)
    return layers


def _parent(name: Any, chain: Sequence[Path]) -> Path:
    """The file that the last one of a chain extends."""
    where = f"{chain[-1]}:{_line_of(chain[-1], (_EXTENDS,))}: {_EXTENDS}"
    if not isinstance(name, str):
        raise PipelineError(f"{where}: expected the path of a params file, got {name!r}")
    parent = Path(os.path.normpath(chain[-1].parent / name))
    if any(parent.resolve() == each.resolve() for each in chain):
        cycle = " -> ".join(str(each) for each in (*chain, parent))
        raise PipelineError(f"{where}: the files extend one another in a circle ({cycle})")
    if not parent.is_file():
        raise PipelineError(f"{where}: {parent}: no such params file")
    return parent


def _content(path: Path) -> dict[Any, Any]:
    """What a YAML file holds, if that is a mapping."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise PipelineError(f"{path}: no such params file") from None
    except OSError as error:
        raise PipelineError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise PipelineError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PipelineError(f"{path}:{line}: is not valid YAML ({error.problem})") from None
    except yaml.YAMLError:
        raise PipelineError(f"{path}: is not valid YAML (it holds a control character)") from None
    if not isinstance(content, dict):
        raise PipelineError(f"{path}: {_EXPECTED}")
    return content


def _sections(content: dict[Any, Any], path: Path, *, extends: bool) -> dict[str, Any]:
    """Return the content of a params file, if it is sections; null resets one, where there is something to reset."""
    if not content and not extends:
        raise PipelineError(f"{path}: {_EXPECTED}")
    for name, section in content.items():
        if not isinstance(name, str) or not (isinstance(section, dict) or (section is None and extends)):
            raise PipelineError(f"{path}:{_line_of(path, (name,))}: {name}: {_EXPECTED}")
    return content


def _merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both else value
    return merged


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def load_section(path: Path, section: str, model: type[ConfigT]) -> ConfigT:
    """Return one validated section of a params file; one that it does not have is all defaults."""
    sections = read_params(path)
    misspelt = [] if section in sections else difflib.get_close_matches(section, sections, n=1, cutoff=0.8)
    if misspelt:
        raise PipelineError(
            f"{_place(path, (misspelt[0],))}: {misspelt[0]}: unknown section; did you mean `{section}`?"
        )
    values = with_shared_keys(model, sections.get(section, {}), sections)
    return validate(model, values, name=section, path=path)


def with_shared_keys(model: type[BaseModel], section: Any, sections: Params) -> Any:
    """Return a section with the keys that are the same as those of another section (see `SameAs`)."""
    if not isinstance(section, dict):
        return section
    shared: dict[str, Any] = {}
    for name, source in shared_keys(model).items():
        other = sections.get(source.section)
        if isinstance(other, dict) and source.key in other:
            shared[name] = other[source.key]
    return _merge(shared, section)


def shared_keys(model: type[BaseModel]) -> dict[str, SameAs]:
    """Return the keys of a section that are the same as those of another one."""
    fields = model.model_fields.items()
    return {name: mark for name, field in fields for mark in field.metadata if isinstance(mark, SameAs)}


def validate(model: type[ConfigT], values: Any, *, name: str, path: Path | None = None) -> ConfigT:
    """Return `values` as a `model`; PipelineError with the first problem otherwise.

    `name` is what the values are called in messages (a section of the params file, or empty for the
    whole file); `path` is where they were read from, if from a file.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise PipelineError(_lines(model, error, name=name, path=path)[0]) from None


def problems(model: type[BaseModel], values: Any, *, name: str, path: Path | None = None) -> list[str]:
    """Return a line for each thing that is wrong with `values` as a `model`, the most helpful first; none if they fit.

    `name` and `path` are as in `validate`.
    """
    try:
        model.model_validate(values)
    except ValidationError as error:
        return _lines(model, error, name=name, path=path)
    return []


def _lines(model: type[BaseModel], error: ValidationError, *, name: str, path: Path | None) -> list[str]:
    # A misspelt key is both unknown and missing: the misspelling is what helps.
    errors = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    unknown = [each["loc"] for each in errors if each["type"] == "extra_forbidden"]
    misspelt = {(*location[:-1], _nearest(model, location)) for location in unknown}
    relevant = [each for each in errors if each["type"] != "missing" or each["loc"] not in misspelt]
    return [_line(model, each, name=name, path=path) for each in relevant]


def _nearest(model: type[BaseModel], location: KeyPath) -> str | None:
    """The existing key that is most like an unknown one."""
    close = difflib.get_close_matches(str(location[-1]), _locate(model, location)[1], n=1)
    return close[0] if close else None


def _line(model: type[BaseModel], error: ErrorDetails, *, name: str, path: Path | None) -> str:
    location, fields = _locate(model, error["loc"])
    keys = ((name,) if name else ()) + location
    where = f"{_place(path, keys)}: " if path else ""
    key = ".".join(str(part) for part in keys)
    if error["type"] == "extra_forbidden":
        nearest = _nearest(model, error["loc"])
        accepted = f"did you mean `{nearest}`?" if nearest else f"accepted: {', '.join(sorted(fields))}"
        return f"{where}{key}: unknown key; {accepted}"
    if error["type"] == "missing":
        return f"{where}{key}: required key is missing"
    message = error["msg"].removeprefix("Value error, ")
    got = "" if isinstance(error["input"], dict | list) else f", got {error['input']!r}"
    subject = f"{key}: " if key else ""
    return f"{where}{subject}{message[:1].lower()}{message[1:]}{got}"


def _locate(model: type[BaseModel], location: KeyPath) -> tuple[KeyPath, list[str]]:
    """The location as it stands in the file, and the field names of the mapping that holds its last key.

    Pydantic puts the tag of a tagged union into the location (`sources.0.gsm8k.train`); no such key is in the file.
    """
    keys: list[str | int] = []
    models, fields = [model], list(model.model_fields)
    for part in location:
        tagged = [each for each in models if len(models) > 1 and part in _tags(each)]
        if tagged:
            models = tagged
            continue
        keys.append(part)
        fields = [name for each in models for name in each.model_fields]
        if isinstance(part, str):
            fields_here = (each.model_fields[part] for each in models if part in each.model_fields)
            models = [inner for field in fields_here for inner in models_of(field)]
    return tuple(keys), fields


def _tags(model: type[BaseModel]) -> tuple[object, ...]:
    """The values of a model's Literal fields: one of them tells it from the others of its union."""
    annotations = (field.annotation for field in model.model_fields.values())
    return tuple(value for kind in annotations if get_origin(kind) is Literal for value in get_args(kind))


def models_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the models that a field may hold: itself, in a list, or as members of a union."""
    models: list[type[BaseModel]] = []
    waiting: list[Any] = [field.annotation]
    while waiting:
        kind = waiting.pop(0)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            models.append(kind)
        else:
            waiting += get_args(kind)
    return models


def _place(path: Path, keys: KeyPath) -> str:
    """The file and line where a key was set: in a params file, or in one that it extends.

    A list comes from one file as a whole. Where the key is missing, it is the place of what should hold it.
    """
    in_mappings = tuple(takewhile(lambda key: isinstance(key, str), keys))
    # The first of the deepest: an overlay goes before what it extends.
    layer = max(_layers(path), key=lambda each: _depth(each.sections, in_mappings))
    return f"{layer.path}:{_line_of(layer.path, keys)}"


def _depth(value: Any, keys: KeyPath) -> int:
    """How many of the keys, from the first on, are in nested mappings."""
    if not keys or not isinstance(value, dict) or keys[0] not in value:
        return 0
    return 1 + _depth(value[keys[0]], keys[1:])


def _line_of(path: Path, keys: KeyPath) -> int:
    """The line (from 1) on which the longest existing prefix of `keys` stands in a YAML file."""
    node = yaml.compose(path.read_text(encoding="utf-8"))
    line = 1
    for key in keys:
        child = None
        if isinstance(node, yaml.MappingNode):
            for key_node, value_node in node.value:
                if key_node.value == str(key):
                    line, child = key_node.start_mark.line + 1, value_node
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
            child = node.value[key]
            line = child.start_mark.line + 1
        if child is None:
            break
        node = child
    return line
