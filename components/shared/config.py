"""Typed configuration: frozen models, unknown keys refused, errors that name file, line and key."""

import difflib
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic_core import ErrorDetails

from components.shared.errors import PipelineError

Params = dict[str, dict[str, Any]]
KeyPath = tuple[str | int, ...]


class Config(BaseModel):
    """What every section of a params file derives from. Values live in params files, never here."""

    # Infinity is within many a bound, and no JSON: lineage could not carry it.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _in_one_order(cls, value: Any) -> Any:
        """Kubeflow hands objects on without an order; sums, columns and lineage must not follow it."""
        return dict(sorted(value.items())) if isinstance(value, dict) else value


ConfigT = TypeVar("ConfigT", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is named twice, of which YAML would silently keep the last."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Return the mapping as it is written, if its keys differ."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        found: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in found:
                    raise yaml.MarkedYAMLError(problem=f"key `{key.value}` is there twice", problem_mark=key.start_mark)
                found.add((key.tag, key.value))
        return node


def read_params(path: Path) -> Params:
    """Return the sections of a params file, or say which line of it is not YAML or not a section."""
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
    return _sections(content, path)


def _sections(content: Any, path: Path) -> Params:
    expected = "expected one mapping per stage, such as `train_grpo:` with its keys below it"
    if not isinstance(content, dict) or not content:
        raise PipelineError(f"{path}: {expected}")
    for name, section in content.items():
        if not isinstance(name, str) or not isinstance(section, dict):
            raise PipelineError(f"{path}:{_line_of(path, (name,))}: {name}: {expected}")
    return content


def load_section(path: Path, section: str, model: type[ConfigT]) -> ConfigT:
    """Return one validated section of a params file."""
    sections = read_params(path)
    if section not in sections:
        raise PipelineError(f"{path}: section `{section}` is missing; it has {', '.join(sections)}")
    return validate(model, sections[section], name=section, path=path)


def validate(model: type[ConfigT], values: Any, *, name: str, path: Path | None = None) -> ConfigT:
    """Return `values` as a `model`; the first problem found becomes a PipelineError.

    `name` is what the values are called in messages (a section of the params file, or empty for the
    whole file); `path` is where they were read from, if from a file.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise PipelineError(_explained(model, error, name=name, path=path)[0]) from None


def problems(model: type[BaseModel], values: Any, *, name: str, path: Path | None = None) -> list[str]:
    """Return a line for each thing that is wrong with `values` as a `model`, the most helpful first; none if they fit.

    `name` and `path` are as in `validate`.
    """
    try:
        model.model_validate(values)
    except ValidationError as error:
        return _explained(model, error, name=name, path=path)
    return []


def _explained(model: type[BaseModel], error: ValidationError, *, name: str, path: Path | None) -> list[str]:
    # A misspelt key is both unknown and missing: the misspelling is what helps.
    errors = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    meant = {(*each["loc"][:-1], _meant(model, each["loc"])) for each in errors if each["type"] == "extra_forbidden"}
    told = [each for each in errors if each["type"] != "missing" or each["loc"] not in meant]
    return [_explain(model, each, name=name, path=path) for each in told]


def _meant(model: type[BaseModel], location: KeyPath) -> str | None:
    """The key that an unknown one was probably meant to be."""
    close = difflib.get_close_matches(str(location[-1]), _locate(model, location)[1], n=1)
    return close[0] if close else None


def _explain(model: type[BaseModel], error: ErrorDetails, *, name: str, path: Path | None) -> str:
    location, fields = _locate(model, error["loc"])
    keys = ((name,) if name else ()) + location
    where = f"{path}:{_line_of(path, keys)}: " if path else ""
    key = ".".join(str(part) for part in keys)
    if error["type"] == "extra_forbidden":
        meant = _meant(model, error["loc"])
        accepted = f"did you mean `{meant}`?" if meant else f"accepted: {', '.join(sorted(fields))}"
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
            models = [inner for each in models if part in each.model_fields for inner in _models(each, part)]
    return tuple(keys), fields


def _tags(model: type[BaseModel]) -> tuple[object, ...]:
    """The values of a model's Literal fields: one of them tells it from the others of its union."""
    annotations = (field.annotation for field in model.model_fields.values())
    return tuple(value for kind in annotations if get_origin(kind) is Literal for value in get_args(kind))


def _models(model: type[BaseModel], field: str) -> list[type[BaseModel]]:
    """The models that a field may hold: itself, in a list, or as members of a union."""
    found: list[type[BaseModel]] = []
    waiting: list[Any] = [model.model_fields[field].annotation]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found.append(kind)
        else:
            waiting += get_args(kind)
    return found


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
