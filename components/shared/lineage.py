"""Lineage: what an artifact was made from, so that any version can be made again.

Digests are over content only: equal bytes have equal digests wherever they lie. A fingerprint is the part of a lineage
that decides whether two runs do the same work.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from components.shared import jsonl
from components.shared.config import Config, without_operational
from components.shared.errors import PipelineError

FILE_NAME = "lineage.json"
Fingerprint = Mapping[str, Any]
"""What decides whether one run may resume the work of another: `config` without operational keys, `inputs` (digests by
name) and `code` (a digest), with `files` of code (digests by path) where it is recorded for people."""
_PACKAGES = ("deepspeed", "great-expectations", "math-verify", "numpy", "tokenizers", "torch", "transformers")
_NUM_LISTED = 3
"""Files of code that are listed one by one."""


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(folder: Path, suffixes: tuple[str, ...] = ("",)) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder with one of the suffixes by its path, in the order of paths."""
    files = sorted(path for path in folder.rglob("*") if path.name.endswith(suffixes) and path.is_file())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in files}


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder's relative file names and contents without its lineage."""
    if path.is_file():
        return file_digest(path)
    if not path.is_dir():
        raise PipelineError(f"{path}: no such file or folder")
    return _listing_digest({name: each for name, each in file_digests(path).items() if name != FILE_NAME})


def value_digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, the same for any order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def code_files() -> dict[str, str]:
    """Return the digest of each file of code that makes the artifacts: Python and templates in components/, by path."""
    return file_digests(Path(__file__).parents[1], suffixes=(".py", ".jinja", ".css"))


def code_digest() -> str:
    """Return the digest of all the code that makes the artifacts."""
    return _listing_digest(code_files())


def _listing_digest(digests: Mapping[str, str]) -> str:
    listing = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256(listing.encode()).hexdigest()


def describe(stage: str, config: dict[str, Any], inputs: dict[str, Path]) -> dict[str, Any]:
    """Return the lineage of what `stage` makes from `inputs` under `config`, with that of each input inside it."""
    return {
        "stage": stage,
        "config": config,
        "inputs": {name: {"digest": digest(path), "lineage": read(path)} for name, path in sorted(inputs.items())},
        "code": code_digest(),
        "python": platform.python_version(),
        # The light image lacks some.
        "packages": {name: metadata.version(name) for name in _PACKAGES if find_spec(name.replace("-", "_"))},
    }


def read(folder: Path) -> dict[str, Any] | None:
    """Return the lineage in an artifact's folder, or None for one that no stage made."""
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    lineage: dict[str, Any] = jsonl.read_json(path)
    return lineage


def write(folder: Path, lineage: dict[str, Any]) -> None:
    """Write `lineage` into an artifact's folder."""
    jsonl.write_json(folder / FILE_NAME, lineage)


def fingerprint(config: Config, made_by: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of the work that a lineage describes."""
    inputs = {name: made["digest"] for name, made in made_by["inputs"].items()}
    return {"config": without_operational(config), "inputs": inputs, "code": made_by["code"]}


def same_fingerprint(config: Config, made_by: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Tell whether two lineages are of the same work; `config` is that of the first."""
    if other is None:
        return False
    try:
        recorded = type(config).model_validate(other["config"])
    except ValidationError:  # written by another version of the code
        return False
    return fingerprint(config, made_by) == fingerprint(recorded, other)


def differences(stage: str, before: Fingerprint | None, now: Fingerprint) -> str:
    """Return how two fingerprints differ, for people: keys with both values, inputs, files of code."""
    if before is None:
        return "its fingerprint is unknown"
    old, new = dict(_flat(stage, before["config"])), dict(_flat(stage, now["config"]))
    keys = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    parts = [f"{name}: {old.get(name, '(none)')} -> {new.get(name, '(none)')}" for name in keys]
    parts += [f"the input `{name}`" for name in _unequal(before["inputs"], now["inputs"])]
    if before["code"] != now["code"]:
        files = [f"components/{name}" for name in _unequal(before.get("files", {}), now.get("files", {}))]
        more = f" and {len(files) - _NUM_LISTED} more files" if len(files) > _NUM_LISTED else ""
        parts.append(f"the code of {', '.join(files[:_NUM_LISTED])}{more}" if files else "the code")
    return "; ".join(parts)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each value of a config, as JSON, with its path."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    else:
        yield name, json.dumps(value, ensure_ascii=False)


def _unequal(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))
