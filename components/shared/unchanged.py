"""Whether a run would make anew what is registered already: the same code on the same data under the same config."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from components.shared.config import Config
from components.shared.operational import without_operational
from components.shared.workspace import Workspace

_LINEAGE = "lineage.json"


@dataclass(frozen=True)
class Promoted:
    """A registered version, and what its policy was made from."""

    tag: str
    lineage: Mapping[str, Any]


def last_promoted(registry: str, name: str) -> Promoted | None:
    """Return the newest version of a model that was not withdrawn; None where none tells what it was made from.

    `registry` is a folder or a URL, as for `register`. PipelineError where it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-registry-") as scratch:
        outside = Workspace(Path(scratch), Path(scratch))
        outside.git("clone", "--quiet", "--bare", registry, "registry")
        clone = Workspace(Path(scratch) / "registry", Path(scratch))
        tags = clone.git("tag", "--list", f"{name}@v*").split()
        for tag in sorted((each for each in tags if _number(each)), key=_number, reverse=True):
            text = clone.try_git("show", f"refs/tags/{tag}:{_LINEAGE}")
            if f"{tag}!" not in {each.partition("#")[0] for each in tags} and text is not None:
                return Promoted(tag, json.loads(text))
    return None


def _number(tag: str) -> tuple[int, ...]:
    match = re.fullmatch(r".*@v(\d+)\.(\d+)\.(\d+)", tag)
    return tuple(int(part) for part in match.groups()) if match else ()


def changes(promoted: Promoted, configs: Mapping[str, Config], code: str) -> list[str]:
    """Return what differs from what a version was made from, in words; empty where a run would make it again.

    Args:
        promoted: The version.
        configs: The section of each stage that a policy is made by; data are named by commit, or are none.
        code: Digest of the code that would run.
    """
    found = [] if promoted.lineage["code"] == code else ["the code"]
    recorded = dict(_configs(promoted.lineage))
    for stage, config in configs.items():
        found += [f"{stage}.{key}" for key in _differing(config, recorded.get(stage, {}))]
    return found


def _configs(lineage: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config of each stage in a lineage."""
    yield lineage["stage"], lineage["config"]
    for made in lineage["inputs"].values():
        if made["lineage"]:
            yield from _configs(made["lineage"])


def _differing(config: Config, recorded: Mapping[str, Any]) -> list[str]:
    """The keys by which two configs would not give the same."""
    try:
        before = without_operational(type(config).model_validate(recorded))
    except ValidationError:  # of an older version of the code, which had other keys
        before = {}
    now = without_operational(config)
    return [key for key in now if key not in before or now[key] != before[key]]
