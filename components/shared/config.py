"""Typed configuration: frozen models, unknown keys refused, errors that name file, line and key.

A params file has a section per stage. With `extends: FILE`, a path relative to its folder, it overrides another file:
mappings are merged key by key, lists and scalars are replaced, and `null` resets a key to its default. With `extends:
[FILE, FILE]`, the second file overrides the first.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin
from urllib.parse import parse_qs, urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

from components.shared.errors import PipelineError

Params = dict[str, dict[str, Any]]
KeyPath = tuple[str | int, ...]

_EXTENDS = "extends"
_KEYS = re.compile(r"\b\w+(?:\.\w+)*\b(?!:\w)")
"""Words that may be keys; not the name of a custom reward, `package.module:function`."""
HOLDS_SECRET = "contains a password or a token; revoke it, and set credentials in the environment or a secret"
"""Error message for a key of `keys_with_secrets`."""
_SECRET_FIELD = re.compile("key$|credential|secret|signature|token|passw|^sig$", re.IGNORECASE)
"""Names of query parameters of a URL that hold a secret."""
_PRESETS = Path(__file__).parents[2] / "params"
_MAX_KEYS = 100_000
_SHOWN_CHARACTERS = 60
_EXPECTED = "expected one mapping per stage, such as `train_grpo:` with its keys below it"
_ACCEPTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "string": "text (in quotes)",
    "path_type": "the path of a file or folder",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of keys to values",
    "model": "a mapping of keys to values",
    "invalid_key": "the name of a key",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "too_short": "a list or mapping with {min_length} or more entries",
    "too_long": "a list with {max_length} or fewer entries",
    "string_too_short": "text with {min_length} or more characters",
    "string_too_long": "text with {max_length} or fewer characters",
    "string_pattern_mismatch": "text that matches {pattern}",
}
"""What is accepted, by the type of a pydantic error, or the first word of this type."""


class Config(BaseModel):
    """Base class of the sections of a params file: keys with their types, bounds, defaults and meaning."""

    # Infinity would satisfy many bounds, but JSON, and thus lineage, cannot represent it.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, values: Any) -> Any:
        """Refuse a boolean as a number, which pydantic reads as 0 or 1: in YAML, `yes` and `on` are booleans."""
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            types = _types_in(field.annotation) if field else []
            if {int, float}.intersection(types) and bool not in types:
                for keys, boolean in _booleans(value, (name,)):
                    raise ValueError(f"{named(keys)}: should be a number, got {str(boolean).lower()}")
        return values

    @field_validator("*")
    @classmethod
    def _sort_mapping(cls, value: Any) -> Any:
        """Sort a mapping: Kubeflow does not keep its order, and sums, columns and lineage must not depend on it."""
        return dict(sorted(value.items())) if isinstance(value, dict) else value

    def is_operational(self, key: str) -> bool:
        """Return whether a key does not affect the result, see `Operational`."""
        return Operational in type(self).model_fields[key].metadata


def _types_in(annotation: Any) -> list[type]:
    """Return the types that an annotation is made of: `str` and `float` for `dict[str, float] | None`, for example."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal or not parts:
        return [annotation] if isinstance(annotation, type) else []
    return [each for part in parts for each in _types_in(part)]


def _booleans(value: Any, keys: KeyPath) -> Iterator[tuple[KeyPath, bool]]:
    """Yield each boolean in the value of a key, with its own keys."""
    if isinstance(value, bool):
        yield keys, value
    elif isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _booleans(each, (*keys, key))


ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True)
class SameAs:
    """Marks a key that a section takes from another: `model: Annotated[ModelConfig, SameAs("train_sft", "model")]`."""

    section: str
    key: str


class Operational:
    """Marks a key that affects where, how fast or how long something is computed, but not its result.

    As in `num_processes: Annotated[int, Operational]`: a run with another value can resume from the same checkpoints.
    """


def without_operational(value: Any) -> Any:
    """Return a config, or a part of one, as a JSON value without its operational keys."""
    if isinstance(value, Config):
        names = [name for name in type(value).model_fields if not value.is_operational(name)]
        return {name: without_operational(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): without_operational(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_operational(each) for each in value]
    return to_jsonable_python(value)


@dataclass(frozen=True)
class _Layer:
    """One file of a chain of params files."""

    path: Path
    sections: dict[str, Any]
    lines: dict[KeyPath, int]
    """Line of every key and list item, from 1."""

    def place(self, keys: KeyPath) -> str:
        """Return file and line of a key, or of the deepest of its parents in the file."""
        return f"{self.path}:{self.lines.get(keys[: self.depth(keys)], 1)}"

    def depth(self, keys: KeyPath) -> int:
        """Return how many of the keys, each inside the one before, are in the file."""
        return sum(keys[:length] in self.lines for length in range(1, len(keys) + 1))


def read_params(path: Path) -> Params:
    """Return the sections of a params file, merged with those of the files it extends, without keys that are null.

    PipelineError if a file is missing, is not valid YAML, has content outside of sections, or extends itself.
    """
    sections: Params = {}
    for layer in reversed(_layers(path)):
        keys = next(keys_with_secrets(layer.sections), None)
        if keys is not None:
            raise PipelineError(f"{layer.place(keys)}: {named(keys)}: {HOLDS_SECRET}")
        sections = laid_over(sections, layer.sections)
    return sections


def laid_over(base: Params, overlay: Params) -> Params:
    """Return sections with an overlay merged in, as for a file that extends another, without keys that are null."""
    merged: Params = _without_nulls(_merge(base, overlay))
    return merged


def parse_sections(text: str, name: str) -> Params:
    """Return the sections in a text, unchecked; PipelineError, beginning with `name`, if it is not a YAML mapping."""
    content, _ = _parse(text, name)
    if not isinstance(content, dict | None):
        raise PipelineError(f"{name}: {_EXPECTED}")
    return content or {}


def own_sections(path: Path) -> Params:
    """Return the sections of a params file alone, without those of the file that it extends."""
    return _layers(path)[0].sections


def keys_with_secrets(value: Any, keys: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of each key whose value is a URL with a password or a token, which a run would record and show."""
    if isinstance(value, dict | list):
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from keys_with_secrets(each, (*keys, key))
    elif isinstance(value, str) and "://" in value:
        parts = urlsplit(value)
        is_token = parts.username and parts.scheme.startswith("http")  # https://TOKEN@host; in ssh:// it is a user
        if parts.password or is_token or any(map(_SECRET_FIELD.search, parse_qs(parts.query))):
            yield keys


def named(keys: KeyPath) -> str:
    """Return a key with those above it, as messages name it: `train_grpo.num_steps`."""
    return ".".join(map(str, keys))


def _layers(path: Path, extended_by: Sequence[Path] = ()) -> list[_Layer]:
    """Return a params file and all files that it extends, each after those that override it."""
    layer = _read_layer(path)
    names = layer.sections.pop(_EXTENDS, [])
    if not isinstance(names, list):
        names = [names]
    where = f"{layer.place((_EXTENDS,))}: {_EXTENDS}"
    layers, chain = [layer], [*extended_by, path]
    for name in reversed(names):
        if not isinstance(name, str):
            raise PipelineError(f"{where}: expected the path of a params file, got {name!r}")
        parent = Path(os.path.normpath(path.parent / name))
        if parent.resolve() in map(Path.resolve, chain):
            cycle = " -> ".join(map(str, [*chain, parent]))
            raise PipelineError(f"{where}: the files extend one another in a circle ({cycle})")
        if not parent.is_file():
            raise PipelineError(f"{where}: {parent}: no such params file{_did_you_mean(parent)}")
        added = _layers(parent, chain)
        added_paths = {each.path for each in added}  # a file that several files extend comes after all of them
        layers = [each for each in layers if each.path not in added_paths] + added
    return layers


def _read_layer(path: Path) -> _Layer:
    """Read one params file; PipelineError with the file, and the line if known, unless it is a mapping of sections."""
    try:
        content, lines = _parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise PipelineError(f"{path}: no such params file{_did_you_mean(path)}") from None
    except OSError as error:
        raise PipelineError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise PipelineError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    if not isinstance(content, dict) or not content:
        raise PipelineError(f"{path}: {_EXPECTED}")
    for name, section in content.items():
        # Null resets a section of an extended file.
        is_section = isinstance(section, dict) or (section is None and _EXTENDS in content)
        if not isinstance(name, str) or not (is_section or name == _EXTENDS):
            raise PipelineError(f"{path}:{lines[(str(name),)]}: {name}: {_EXPECTED}")
    return _Layer(path, content, lines)


def _did_you_mean(path: Path) -> str:
    """Return a hint at a params file with a similar name, in the folder of a missing one or among the presets."""
    folders = (_PRESETS, Path(_PRESETS.name), path.parent)  # of files with the same name, the last
    files = {each.name: each for folder in folders for each in folder.glob("*.yaml")}
    near = difflib.get_close_matches(f"{path.name.removesuffix('.yaml')}.yaml", files, n=1, cutoff=0.8)
    return f"; did you mean {files[near[0]]}?" if near else ""


def _parse(text: str, name: str) -> tuple[Any, dict[KeyPath, int]]:
    """Return the content of a YAML text, and the line of each key; errors call the text `name`."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        _add_lines(lines, root, ())  # before construction, which moves merged keys into their mappings
        return loader.construct_document(root) if root else None, lines
    except RecursionError:
        raise PipelineError(f"{name}: is not YAML of a sensible depth") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        reason = getattr(error, "problem", "it holds a control character")
        raise PipelineError(f"{where}: is not valid YAML ({reason})") from None


def _add_lines(lines: dict[KeyPath, int], node: yaml.Node | None, keys: KeyPath) -> None:
    """Add the line of every key below a node; an error for duplicates, of which YAML would silently keep the last."""
    items: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(key.value, key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
    elif isinstance(node, yaml.SequenceNode):
        items = [(index, each, each) for index, each in enumerate(node.value)]
    for name, start, value in items:
        if (*keys, name) in lines:
            raise yaml.MarkedYAMLError(problem=f"key `{name}` is a duplicate", problem_mark=start.start_mark)
        if len(lines) >= _MAX_KEYS:  # nested aliases expand to billions of keys
            raise yaml.MarkedYAMLError(problem=f"it has more than {_MAX_KEYS:,} keys", problem_mark=start.start_mark)
        lines[(*keys, name)] = start.start_mark.line + 1
        _add_lines(lines, value, (*keys, name))


def _merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `overlay`, key by key in mappings that both have."""
    merged = dict(base)
    for key, value in overlay.items():
        are_mappings = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if are_mappings else value
    return merged


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def load_section(path: Path, section: str, model: type[ConfigT]) -> ConfigT:
    """Return a validated section of a params file; a missing section has all defaults."""
    sections = read_params(path)
    similar = difflib.get_close_matches(section, sections, n=1, cutoff=0.8)
    if section not in sections and similar:
        where = f"{_place(path, (similar[0],))}: {similar[0]}"
        raise PipelineError(f"{where}: unknown section; did you mean `{section}`?")
    values = with_shared_keys(model, sections.get(section, {}), sections)
    return validate(model, values, name=section, path=path)


def with_shared_keys(model: type[BaseModel], section: Any, sections: Params) -> Any:
    """Return a section with the keys that it takes from other sections (see `SameAs`), unless it sets them itself."""
    if not isinstance(section, dict):
        return section
    shared = {}
    for name, source in shared_keys(model).items():
        other = sections.get(source.section)
        if isinstance(other, dict) and source.key in other:
            shared[name] = other[source.key]
    return _merge(shared, section)


def shared_keys(model: type[BaseModel]) -> dict[str, SameAs]:
    """Return the source of each key that a section takes from another one, by the name of the key."""
    fields = model.model_fields.items()
    return {name: mark for name, field in fields for mark in field.metadata if isinstance(mark, SameAs)}


def validate(model: type[ConfigT], values: Any, *, name: str, path: Path | None = None) -> ConfigT:
    """Return `values` as a `model`; PipelineError with the first problem otherwise.

    `name` is their section in messages, empty for a whole params file; `path` is the file that they come from, if any.
    """
    try:
        return model.model_validate(values)
    except ValidationError:
        raise PipelineError(problems(model, values, name=name, path=path)[0]) from None


def problems(
    model: type[BaseModel], values: Any, *, name: str, path: Path | None = None, settings: Sequence[str] = ()
) -> list[str]:
    """Return a line for each error in `values`, the most helpful first; `name` and `path` are as in `validate`.

    `settings` are the keys that `--set` has set.
    """
    try:
        model.model_validate(values)
    except ValidationError as error:
        errors = error.errors()
    else:
        return []
    above = (name,) if name else ()
    place = partial(_origin, path, settings, above)
    lines: list[str] = []
    misspelt: set[KeyPath] = set()  # by their right names
    # Unknown keys first: a misspelt key is unknown and missing, and only the first error shows the right spelling.
    for each in sorted(errors, key=lambda each: each["type"] != "extra_forbidden"):
        if each["type"] == "missing" and each["loc"] in misspelt:
            continue
        location, fields, _ = _locate(model, each["loc"])
        at_fault = location
        if each["type"] == "extra_forbidden":
            nearest = difflib.get_close_matches(str(location[-1]), fields, n=1)
            misspelt |= {(*each["loc"][:-1], field) for field in nearest}
            nearest = nearest or list(_keys_named(model, location))
            hint = f"did you mean `{nearest[0]}`?" if nearest else f"accepted: {', '.join(sorted(fields))}"
            message = f"unknown key; {hint}"
        elif each["type"] == "value_error" and isinstance(each["input"], dict):
            location, at_fault, message = _about_rule(model, each, above, place)
        else:
            location, message = _about_value(model, each)
            at_fault = location
        where = place(at_fault)
        line = ": ".join(filter(None, [named((*above, *location)), message]))
        lines.append(f"{where} {line}" if where == "--set" else f"{where}: {line}" if where else line)
    return lines


def _origin(path: Path | None, settings: Sequence[str], above: KeyPath, location: KeyPath) -> str:
    """Return `--set`, or file and line, where a key is set; empty if neither is known."""
    if _is_set(named((*above, *location)), settings):
        return "--set"
    return _place(path, (*above, *location)) if path else ""


def _is_set(name: str, settings: Sequence[str]) -> bool:
    """Return whether `--set` has set a key, a part of it, or what it is a part of."""
    return any(f"{each}.".startswith(f"{name}.") or name.startswith(f"{each}.") for each in settings)


def _about_value(model: type[BaseModel], error: ErrorDetails) -> tuple[KeyPath, str]:
    """Return the keys and the message of an error in one value: what is accepted, and the value."""
    location, _, models = _locate(model, error["loc"])
    kind, limits, value = error["type"], error.get("ctx", {}), error["input"]
    if kind in {"union_tag_not_found", "union_tag_invalid"}:
        key = limits["discriminator"].strip("'")
        return (*location, key), _about_tag(models, key, limits.get("tag"))
    if kind == "missing" and isinstance(location[-1], str):
        is_section = len(location) == 1 and models
        hint = "; add it, or extend a preset that has it, such as `extends: params.yaml`" if is_section else ""
        return location, f"required {'section' if is_section else 'key'} is missing{hint}"
    if kind == "missing":  # an item of a tuple
        location, kind, limits = location[:-1], "too_short", {"min_length": int(location[-1]) + 1}
    accepted = _ACCEPTED.get(kind) or _ACCEPTED.get(kind.partition("_")[0])
    if not accepted:  # a validator's message
        problem, semicolon, remedy = error["msg"].removeprefix("Value error, ").partition("; ")
        got = "" if isinstance(value, dict | list) else f", got {_shown(value)}"
        return location, f"{problem}{got}{semicolon}{remedy}"
    message = f"should be {accepted.format(**limits)}, got {_shown(value)}"
    return (location[:-1], f"this key {message}") if location[-1] == "[key]" else (location, message)


def _about_tag(members: Sequence[type[BaseModel]], key: str, tag: str | None) -> str:
    """Return the message for a key that has to name a member of a union, and is missing or names none (`tag`)."""
    tags = [accepted for member in members for accepted in get_args(member.model_fields[key].annotation)]
    nearest = difflib.get_close_matches(tag or "", tags, n=1)
    hint = f"did you mean `{nearest[0]}`?" if nearest else f"accepted: {', '.join(sorted(tags))}"
    return f"unknown {key} `{tag}`; {hint}" if tag else f"required key is missing; {hint}"


def _about_rule(
    model: type[BaseModel], error: ErrorDetails, above: KeyPath, place: Callable[[KeyPath], str]
) -> tuple[KeyPath, KeyPath, str]:
    """Return the keys, those at fault, and the message of an error in a section; `above` are the keys above `model`.

    If the message begins with a key (`vllm.port: ...`), the error is about this key. If the message names several keys,
    the value and the place of each are added.
    """
    section, _, models = _locate(model, error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    words = dict.fromkeys(match[0] for match in _KEYS.finditer(message))
    related: list[KeyPath] = [tuple(each.split(".")) for each in words if _is_key(models, each)]
    first = related[0] if related and message.startswith(named(related[0])) else ()
    location = section
    if first and message.startswith(f"{named(first)}: "):
        location, message = (*section, *first), message.partition(": ")[2]
    if len(related) > 1:
        states = (_state(models, error["input"], keys, place((*section, *keys))) for keys in related)
        names = (named((*above, *section, *keys)) for keys in related)
        message += f" ({'; '.join(map(' '.join, zip(names, states, strict=True)))})"
    return location, (*section, *first), message


def _is_key(models: Sequence[type[BaseModel]], word: str) -> bool:
    """Tell whether a word of a message is a key of one of the models, or of a section in them, such as `vllm.port`."""
    name, dot, _ = word.partition(".")
    fields = [each.model_fields[name] for each in models if name in each.model_fields]
    return any(dot or field.annotation not in models_of(field) for field in fields)


def _state(models: Sequence[type[BaseModel]], values: Any, keys: KeyPath, place: str) -> str:
    """Return the value of a key of a section with its place, or its default."""
    fields: list[FieldInfo] = []
    for key in keys:
        fields = [each.model_fields[str(key)] for each in models if key in each.model_fields]
        models = [inner for field in fields for inner in models_of(field)]
        values = values.get(key) if isinstance(values, dict) else None
    if values is not None:
        return f"is {_shown(values)}, {place}" if place else f"is {_shown(values)}"
    default = fields[0].get_default(call_default_factory=True) if fields else None
    return "is not set" if default is None else f"is {_shown(default)} by default"


def _shown(value: Any) -> str:
    """Return a value as messages show it: as JSON, which is also YAML, truncated if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."


def _locate(model: type[BaseModel], location: KeyPath) -> tuple[KeyPath, list[str], list[type[BaseModel]]]:
    """Return the keys in the file for a location of pydantic, the names accepted for the last of them, and its models.

    Pydantic puts the tag of a tagged union into the location (`sources.0.gsm8k.train`); no such key is in the file.
    """
    keys: list[str | int] = []
    models, fields = [model], list(model.model_fields)  # several models are the members of a union
    for part in location:
        tagged = [each for each in models if part in _tags(each)]
        if tagged and len(models) > 1:  # `part` is a tag
            models = tagged
            continue
        keys.append(part)
        fields = [name for each in models for name in each.model_fields]
        if isinstance(part, str):  # not the index of a list item, which is of the same models
            values = [each.model_fields[part] for each in models if part in each.model_fields]
            models = [inner for field in values for inner in models_of(field)]
    return tuple(keys), fields, models


def _keys_named(model: type[BaseModel], location: KeyPath, above: KeyPath = ()) -> Iterator[str]:
    """Yield the keys below the first key of `location` that have the name of its last key."""
    for name, field in model.model_fields.items():
        if above or name == location[0]:
            if name == location[-1]:
                yield named((*above, name))
            for inner in models_of(field):
                yield from _keys_named(inner, location, (*above, name))


def _tags(model: type[BaseModel]) -> tuple[object, ...]:
    """Return the values of a model's Literal fields, which distinguish it from other members of its union."""
    annotations = (field.annotation for field in model.model_fields.values())
    return tuple(value for kind in annotations if get_origin(kind) is Literal for value in get_args(kind))


def models_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the models in the type of a field: itself, in a list, or as members of a union."""
    return [each for each in _types_in(field.annotation) if issubclass(each, BaseModel)]


def with_place(path: Path, line: str, settings: Sequence[str] = ()) -> str:
    """Return an error's line, which begins with a key, after `--set`, file and line that set it, or the file alone."""
    name = line.partition(": ")[0]
    if _is_set(name, settings):
        return f"--set {line}"
    keys = tuple(int(key) if key.isdecimal() else key for key in name.split("."))
    is_set = any(layer.depth(keys) == len(keys) for layer in _layers(path))
    return f"{_place(path, keys) if is_set else path}: {line}"


def _place(path: Path, keys: KeyPath) -> str:
    """Return file and line where a key is set, in a params file or in one that it extends.

    For a missing key, they are those of its parent.
    """
    above_lists = tuple(takewhile(lambda key: isinstance(key, str), keys))  # one file replaces a list as a whole
    # The file with most of the keys; on ties the first, as an overlay comes before the files that it extends.
    return max(_layers(path), key=lambda layer: layer.depth(above_lists)).place(keys)
