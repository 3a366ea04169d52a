"""Typed configuration: frozen models, unknown keys refused, errors that name file, line and key."""

import difflib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from components.shared.errors import PipelineError

Params = dict[str, dict[str, Any]]
KeyPath = tuple[str | int, ...]


class Config(BaseModel):
    """What every section of a params file derives from. Values live in params files, never here."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


ConfigT = TypeVar("ConfigT", bound=BaseModel)


def read_params(path: Path) -> Params:
    """Return the sections of a params file, or say which line of it is not YAML or not a section."""
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PipelineError(f"{path}: no such params file") from None
    except OSError as error:
        raise PipelineError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise PipelineError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except yaml.YAMLError as error:
        line = error.problem_mark.line + 1 if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else 1
        raise PipelineError(f"{path}:{line}: is not valid YAML") from None
    if not isinstance(sections, dict) or not all(isinstance(section, dict) for section in sections.values()):
        raise PipelineError(f"{path}: expected one mapping per stage, such as `train_grpo:` with its keys below it")
    return sections


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
        raise PipelineError(_explain(model, error.errors()[0], name=name, path=path)) from None


def _explain(model: type[BaseModel], error: ErrorDetails, *, name: str, path: Path | None) -> str:
    prefix = (name,) if name else ()
    keys = prefix + error["loc"]
    where = f"{path}:{_line_of(path, keys)}: " if path else ""
    key = ".".join(str(part) for part in keys)
    if error["type"] == "extra_forbidden":
        return f"{where}{key}: unknown key; {_accepted(model, error['loc'])}"
    if error["type"] == "missing":
        return f"{where}{key}: required key is missing"
    message = error["msg"].removeprefix("Value error, ")
    got = "" if isinstance(error["input"], dict | list) else f", got {error['input']!r}"
    return f"{where}{key}: {message[:1].lower()}{message[1:]}{got}"


def _accepted(model: type[BaseModel], location: KeyPath) -> str:
    fields = _fields_at(model, location[:-1])
    close = difflib.get_close_matches(str(location[-1]), fields, n=1)
    return f"did you mean `{close[0]}`?" if close else f"accepted: {', '.join(sorted(fields))}"


def _fields_at(model: type[BaseModel], location: KeyPath) -> list[str]:
    """The field names of the model nested at `location`; of the deepest one found on the way, otherwise."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            break
        model = field.annotation
    return list(model.model_fields)


def _line_of(path: Path, keys: KeyPath) -> int:
    """The line (from 1) on which the longest existing prefix of `keys` stands in a YAML file."""
    node = yaml.compose(path.read_text(encoding="utf-8"))
    line = 1
    for key in keys:
        child = None
        if isinstance(node, yaml.MappingNode):
            for key_node, value_node in node.value:
                if key_node.value == key:
                    line, child = key_node.start_mark.line + 1, value_node
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
            child = node.value[key]
            line = child.start_mark.line + 1
        if child is None:
            break
        node = child
    return line
