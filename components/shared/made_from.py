"""What a piece of work is made from: whether two are the same, and in words how they differ."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from components.shared.config import Config
from components.shared.operational import without_operational

MadeFrom = Mapping[str, Any]
"""What decides whether one run can go on from where another stopped: `config`, `inputs` (digests by name), and `code`
(a digest), with `files` of code (digests by path) where it is written down for people."""
_NONE = object()
_NUM_NAMED = 3
"""Files of code that are named one by one."""


def made_from(config: Config, made_by: Mapping[str, Any]) -> MadeFrom:
    """Return what work is made from, out of its lineage; keys that do not change the result are left out."""
    inputs = {name: made["digest"] for name, made in made_by["inputs"].items()}
    return {"config": without_operational(config), "inputs": inputs, "code": made_by["code"]}


def is_same(config: Config, made_by: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Tell whether two lineages are of the same work; `config` is that of the first."""
    if other is None:
        return False
    try:
        recorded = type(config).model_validate(other["config"])
    except ValidationError:  # of another version of the code
        return False
    return made_from(config, made_by) == made_from(recorded, other)


def differences(stage: str, before: MadeFrom, now: MadeFrom) -> str:
    """Return in words how two pieces of work of a stage differ: each key with both values, inputs, files of code."""
    old, new = (dict(_flat(stage, each["config"])) for each in (before, now))
    keys = [name for name in {**old, **new} if old.get(name, _NONE) != new.get(name, _NONE)]
    found = [f"{name}: {_shown(old, name)} -> {_shown(new, name)}" for name in keys]
    inputs = before["inputs"], now["inputs"]
    found += [f"the input `{name}`" for name in _unequal(*inputs)]
    if before["code"] != now["code"]:
        files = [f"components/{name}" for name in _unequal(before.get("files", {}), now.get("files", {}))]
        found.append(f"the code of {_first_of(files)}" if files else "the code")
    return "; ".join(found)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Each value of a config with its path."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    else:
        yield name, value


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "(none)"


def _unequal(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))


def _first_of(names: Sequence[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more files" if more > 0 else "")
