"""Lineage: the inputs, config and code that an artifact was made from, so that any version can be made again.

Digests depend on content only, not on paths. A fingerprint is the part of a lineage that decides whether two runs do
the same work. `components.shared.execution` records who ran a stage, when and where.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from components.shared import jsonl
from components.shared.config import Config, without_operational
from components.shared.environment import RUN_ID_VARIABLE, RUN_NAME_VARIABLE
from components.shared.errors import PipelineError
from components.shared.execution import ABSENT, Environment, Revision, Run, current_revision, person, place_of

FILE_NAME = "lineage.json"
Fingerprint = Mapping[str, Any]
"""What decides whether two runs do the same work: `config` without operational keys, `inputs` (digests by name) and
`code` (a digest); for people, `files` of code (digests by path)."""
_NUM_LISTED = 3
"""Keys and files of code that are listed one by one."""
_IMPORT = re.compile(r"^\s*(?:from|import) components\.(\w+)", re.MULTILINE)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(folder: Path, suffixes: tuple[str, ...] = ("",)) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder with one of the suffixes, by its relative path, sorted."""
    files = sorted(path for path in folder.rglob("*") if path.name.endswith(suffixes) and path.is_file())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in files}


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder's relative file names and contents without its lineage."""
    if path.is_file():
        return file_digest(path)
    if not path.is_dir():
        raise PipelineError(f"{path}: no such file or folder")
    return folder_digest(file_digests(path))


def folder_digest(digests: Mapping[str, str]) -> str:
    """Return the digest of a folder from the SHA-256 of each file in it, by its path."""
    return _listing_digest({name: digests[name] for name in sorted(digests, key=PurePosixPath) if name != FILE_NAME})


def value_digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, the same for any order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def code_files() -> dict[str, str]:
    """Return the SHA-256 of each file of code that makes artifacts, by its path in components/."""
    return file_digests(Path(__file__).parents[1], suffixes=(".py", ".jinja", ".css"))


def code_digest() -> str:
    """Return the digest of all code that makes artifacts."""
    return _listing_digest(code_files())


def stage_files(stage: str) -> dict[str, str]:
    """Return the digests of the files of code that a stage may run, by path."""
    packages = stage_packages(stage)
    return {path: digest for path, digest in code_files().items() if path.partition("/")[0] in packages}


@cache
def stage_packages(stage: str) -> set[str]:
    """Return the packages of components/ that a stage may run: its own, and all that these import, in turn."""
    packages, pending = set[str](), {stage}
    while pending:
        package = pending.pop()
        packages.add(package)
        for path in (Path(__file__).parents[1] / package).rglob("*.py"):
            pending |= set(_IMPORT.findall(path.read_text(encoding="utf-8"))) - packages
    return packages


def _listing_digest(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of a listing with a line `<path> <digest>` for each file, in the given order."""
    listing = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256(listing.encode()).hexdigest()


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Material(_Record):
    """A raw file or a model that a stage read from outside the graph of stages."""

    sha256: str | None = None
    """Digest of the file or folder; null for a model of the hub, which its commit identifies."""
    size_bytes: int | None = None
    dvc_md5: str | None = None
    """MD5 in the DVC pointer to it, if it has one."""
    repository: str | None = None
    """Git repository or hub model that it was read from; null for this machine."""
    commit: str | None = None
    """Commit of the repository."""


class Input(_Record):
    """An artifact that a stage read."""

    digest: str
    made_by: str | None = None
    """Key of the work that made it; null if no stage did."""


class Work(_Record):
    """What a stage ran on: its config, inputs and code. Equal for equal runs, on any machine and at any time."""

    stage: str
    config: dict[str, Any]
    inputs: dict[str, Input]
    code: str
    """Digest of all code that makes artifacts."""
    materials: dict[str, Material] = {}
    """Materials by their path or name in the config."""


class Lineage(_Record):
    """What an artifact was made from: the work of the stage that made it and of all stages before it, each once.

    Records refer to one another by keys: a record's key is the digest of its content.
    """

    format: Literal[2] = 2
    made_by: str
    """Key of the work that made the artifact."""
    stages: dict[str, Work]
    runs: tuple[Run, ...] = ()
    """Executions of the stages: what differs between equal runs."""
    environments: dict[str, Environment] = {}
    revisions: dict[str, Revision] = {}

    @model_validator(mode="after")
    def _keys_are_digests(self) -> Self:
        for records in (self.stages, self.environments, self.revisions):
            for key, record in records.items():
                if _key(record) != key:
                    raise ValueError(f"the record {key[:12]} does not have that digest")
        if self.made_by not in self.stages:
            raise ValueError(f"the stage {self.made_by[:12]} is missing")
        return self

    @property
    def work(self) -> Work:
        """The work of the stage that made the artifact."""
        return self.stages[self.made_by]

    @property
    def works(self) -> list[Work]:
        """The work of all stages, each after those whose outputs it reads."""
        return in_order(self.stages)

    def stage(self, name: str) -> Work | None:
        """Return the work of the stage of this name; None if it has no part in the artifact."""
        return next((work for work in self.works if work.stage == name), None)

    def maker(self, artifact: Input) -> Work | None:
        """Return the work of the stage that made an input; None if no stage did."""
        return None if artifact.made_by is None else self.stages.get(artifact.made_by)

    def run(self, stage: str | None = None) -> Run | None:
        """Return the execution of the stage of this name, by default of the stage that made the artifact."""
        keys = [self.made_by]
        if stage:
            keys = [key for key, work in self.stages.items() if work.stage == stage]
        return next((run for run in self.runs if run.of in keys), None)

    def environment(self, stage: str | None = None) -> Environment | None:
        """Return the environment of `run(stage)`; None if there is no such run."""
        run = self.run(stage)
        return None if run is None else self.environments[run.environment]

    def revision(self, stage: str | None = None) -> Revision | None:
        """Return the state of the code of `run(stage)`; None if there is no such run."""
        run = self.run(stage)
        return None if run is None else self.revisions[run.revision]

    def contains(self, other: "Lineage") -> bool:
        """Return whether every record of another lineage is in this one."""
        return (
            other.stages.items() <= self.stages.items()
            and set(other.runs) <= set(self.runs)
            and other.environments.items() <= self.environments.items()
            and other.revisions.items() <= self.revisions.items()
        )


def in_order(stages: Mapping[str, Work]) -> list[Work]:
    """Return the work of stages in a deterministic order, each after the work whose outputs it reads."""

    @cache
    def depth(key: str) -> int:
        makers = {each.made_by for each in stages[key].inputs.values()} & stages.keys()
        return max((depth(maker) + 1 for maker in makers if maker), default=0)

    return [stages[key] for key in sorted(stages, key=lambda key: (depth(key), stages[key].stage, key))]


def _key(record: BaseModel) -> str:
    return value_digest(record.model_dump(mode="json"))


def describe(stage: str, config: dict[str, Any], inputs: Mapping[str, Path]) -> Lineage:
    """Return the lineage of the outputs that `stage` will make from `inputs` with `config`."""
    lineages = {name: read(path) for name, path in sorted(inputs.items())}
    sources = {
        name: Input(digest=digest(inputs[name]), made_by=each.made_by if each else None)
        for name, each in lineages.items()
    }
    work = Work(stage=stage, config=config, inputs=sources, code=code_digest())
    return joined(work, filter(None, lineages.values()))


def joined(work: Work, of_inputs: Iterable[Lineage]) -> Lineage:
    """Return the lineage of the outputs of `work`, with all records in the lineages of its inputs."""
    stages, environments, revisions = {_key(work): work}, dict[str, Environment](), dict[str, Revision]()
    runs = set[Run]()
    for each in of_inputs:
        stages |= each.stages
        runs.update(each.runs)
        environments |= each.environments
        revisions |= each.revisions
    return Lineage(
        made_by=_key(work),
        stages=dict(sorted(stages.items())),
        runs=tuple(sorted(runs, key=lambda run: (run.started, run.of, run.by, run.finished))),
        environments=dict(sorted(environments.items())),
        revisions=dict(sorted(revisions.items())),
    )


def complete(
    described: Lineage, materials: Mapping[str, Material], started: datetime, work_folder: Path | None = None
) -> Lineage:
    """Return a lineage from `describe` with the stage's materials and its run, from `started` (UTC) until now."""
    work = described.work.model_copy(update={"materials": dict(sorted(materials.items()))})
    place, revision = place_of(work_folder), current_revision().without_secrets()
    run = Run(
        of=_key(work),
        by=person(),
        run_id=os.environ.get(RUN_ID_VARIABLE) or None,
        run_name=os.environ.get(RUN_NAME_VARIABLE) or None,
        started=started,
        finished=datetime.now(UTC),
        threads=place.threads,
        environment=_key(place.environment),
        revision=_key(revision),
    )
    return _with_run(described, work, run, place.environment, revision)


def of_reused_outputs(earlier: Lineage, described: Lineage) -> Lineage:
    """Return the lineage of outputs that another run made and this run reuses: that run's work on this run's inputs.

    Equal inputs can have different lineages, as the stages before them may have run again.
    """
    work = earlier.work.model_copy(update={"inputs": described.work.inputs})
    run = next(run for run in earlier.runs if run.of == earlier.made_by)
    environment, revision = earlier.environments[run.environment], earlier.revisions[run.revision]
    return _with_run(described, work, run.model_copy(update={"of": _key(work)}), environment, revision)


def _with_run(described: Lineage, work: Work, run: Run, environment: Environment, revision: Revision) -> Lineage:
    """Return `described` with `work` in place of the work of its stage, and with the run of that work."""
    stages = {key: each for key, each in described.stages.items() if key != described.made_by}
    environments = {**described.environments, run.environment: environment}
    revisions = {**described.revisions, run.revision: revision}
    records = {"runs": (*described.runs, run), "environments": environments, "revisions": revisions}
    return joined(work, [described.model_copy(update={"stages": stages, **records})])


def read(folder: Path) -> Lineage | None:
    """Return the lineage in an artifact's folder, or None if no stage made it; PipelineError as for `parse`."""
    path = folder / FILE_NAME
    return parse(jsonl.read_json(path), name=str(path)) if path.is_file() else None


def parse(value: Any, *, name: str) -> Lineage:
    """Return the lineage in the content of the file `name`; PipelineError if it is damaged or of an older format."""
    if isinstance(value, dict) and "stage" in value:
        raise PipelineError(f"{name}: was made by an older version; run the stage that made it again")
    try:
        return Lineage.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        fault = f"{key}: {first['msg']}" if key else first["msg"]
        raise PipelineError(f"{name}: is damaged ({fault}); restore it, or run the stage that made it again") from None


def write(folder: Path, lineage: Lineage) -> None:
    """Write `lineage` into an artifact's folder."""
    jsonl.write_json(folder / FILE_NAME, lineage.model_dump(mode="json"))


def fingerprint(stage: str, config: Config, inputs: Mapping[str, str], sources: Mapping[str, Material]) -> Fingerprint:
    """Return the fingerprint of a stage's work on inputs with these digests; files in `sources` count as inputs."""
    inputs = {**inputs, **{name: each.sha256 for name, each in sources.items() if each.sha256}}
    files = stage_files(stage)
    return {"config": without_operational(config), "inputs": inputs, "code": _listing_digest(files), "files": files}


def differences(stage: str, before: Fingerprint | None, now: Fingerprint) -> str:
    """Return how two fingerprints differ, for people: config keys with both values, names of inputs, files of code."""
    if before is None:
        return "its fingerprint is unknown"
    old, new = dict(flat(stage, before["config"])), dict(flat(stage, now["config"]))
    keys = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    parts = [f"{name}: {old.get(name, ABSENT)} -> {new.get(name, ABSENT)}" for name in keys[:_NUM_LISTED]]
    if len(keys) > _NUM_LISTED:
        parts.append(f"{len(keys) - _NUM_LISTED} more keys")
    parts += [f"changed input `{name}`" for name in _unequal(before["inputs"], now["inputs"])]
    if before["code"] != now["code"]:
        files = [f"components/{name}" for name in _unequal(before.get("files", {}), now.get("files", {}))]
        more = f" and {len(files) - _NUM_LISTED} more files" if len(files) > _NUM_LISTED else ""
        parts.append(f"changed code: {', '.join(files[:_NUM_LISTED])}{more}" if files else "changed code")
    return "; ".join(parts)


def flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the dotted key, which begins with `name`, and the JSON text of each value in a nested config.

    As in `--set`, the key of an object in a list contains its index.
    """
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from flat(f"{name}.{key}", each)
    else:
        yield name, json.dumps(value, ensure_ascii=False)


def _unequal(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))
