"""Lineage: what an artifact was made from, so that any version can be made again.

Digests are over content only: equal bytes have equal digests wherever they lie.
"""

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from components.shared import jsonl
from components.shared.errors import PipelineError

FILE_NAME = "lineage.json"
_PACKAGES = ("deepspeed", "great-expectations", "math-verify", "numpy", "tokenizers", "torch", "transformers")


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder's relative file names and contents without its lineage."""
    if path.is_file():
        return file_digest(path)
    if not path.is_dir():
        raise PipelineError(f"{path}: no such file or folder")
    files = sorted(file for file in path.rglob("*") if file.is_file() and file != path / FILE_NAME)
    listing = "".join(f"{file.relative_to(path).as_posix()} {file_digest(file)}\n" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def value_digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, the same for any order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def code_files() -> dict[str, str]:
    """Return the digest of each file of code that makes the artifacts: Python and templates in components/, by path."""
    root = Path(__file__).parents[1]
    files = sorted(file for file in root.rglob("*") if file.suffix in {".py", ".jinja", ".css"})
    return {file.relative_to(root).as_posix(): file_digest(file) for file in files}


def code_digest() -> str:
    """Return the digest of all the code that makes the artifacts."""
    listing = "".join(f"{name} {digest}\n" for name, digest in code_files().items())
    return hashlib.sha256(listing.encode()).hexdigest()


def describe(stage: str, config: dict[str, Any], inputs: dict[str, Path]) -> dict[str, Any]:
    """Return the lineage of what `stage` makes from `inputs` under `config`, with that of each input inside it."""
    return {
        "stage": stage,
        "config": config,
        "inputs": {name: {"digest": digest(path), "lineage": read(path)} for name, path in sorted(inputs.items())},
        "code": code_digest(),
        "python": platform.python_version(),
        "packages": dict(_installed(_PACKAGES)),
    }


def _installed(packages: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each package that is here with its version: the light image goes without some."""
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def read(folder: Path) -> dict[str, Any] | None:
    """Return the lineage kept in an artifact's folder, or None for one that no stage made."""
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    lineage: dict[str, Any] = jsonl.read_json(path)
    return lineage


def write(folder: Path, lineage: dict[str, Any]) -> None:
    """Keep `lineage` in an artifact's folder."""
    jsonl.write_json(folder / FILE_NAME, lineage)
