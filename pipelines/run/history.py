"""The runs on this machine, read from their folders.

<outputs>/runs/<name>/   about.json (params file, note and tags), params.yaml, journal.jsonl, run.log, artifacts/;
                         report.html and summary.json once the report is made; `run.lock` is locked during the run
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from components.shared import durable, jsonl
from components.shared.errors import PipelineError, RetryableError

OUTPUTS = Path("outputs")
LATEST = "latest"
"""Name for the run that was started last."""
PARAMS, JOURNAL, LOG, ARTIFACTS, LOCK = "params.yaml", "journal.jsonl", "run.log", "artifacts", "run.lock"
PAGE, FIGURES, ABOUT = "report.html", "summary.json", "about.json"
MODELS = {"base": "base", "sft": "SFT", "grpo": "GRPO"}
"""The models that a run compares, with their names for people."""
_NAME = re.compile(r"(\d{8}T\d{6}Z)-(.+)")
_NUM_NAMED = 5
_TRY_AGAIN = RetryableError.exit_code


class About(BaseModel):
    """The params file of a run, and its user's note and tags."""

    model_config = ConfigDict(frozen=True)

    params: str
    """Name of its params file."""
    note: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageRun:
    """One stage of a run, finished or not."""

    name: str
    outputs: Mapping[str, Path]
    """Folders of its outputs, complete only if it is finished."""
    finished: Mapping[str, Any] | None = None
    """Event `finished` of the journal; None until then."""
    error: Mapping[str, Any] | None = None
    """Event `failed` of the journal; None if the stage succeeded or was killed."""
    work: Path | None = None
    """Folder of unfinished work, if the stage has one."""

    @property
    def seconds(self) -> float | None:
        """Duration in the run that computed it; None if it is not finished."""
        return None if self.finished is None else self.finished.get("seconds", 0.0)

    @property
    def end(self) -> str:
        """How an unfinished stage ended: `failed`, or `stopped` if the same run can be tried again."""
        return "stopped" if (self.error or {}).get("exit_code", _TRY_AGAIN) == _TRY_AGAIN else "failed"

    @property
    def reused_from(self) -> str | None:
        """Name of the earlier run whose outputs it took; None if it computed them itself."""
        return None if self.finished is None else self.finished.get("reused_from")


@dataclass(frozen=True)
class Run:
    """One run, finished or not."""

    folder: Path
    about: About
    started: datetime
    events: Sequence[Mapping[str, Any]] = field(repr=False)
    figures: Mapping[str, Any] = field(repr=False)
    """Content of summary.json; empty without a report."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.folder.name

    @property
    def verdict(self) -> Mapping[str, Any]:
        """The verdict of the gate; empty without a report."""
        return self.figures.get("verdict") or {}

    @property
    def version(self) -> Mapping[str, Any]:
        """The version that it registered, if any."""
        return self.figures.get("version") or {}

    @cached_property
    def is_running(self) -> bool:
        """Whether a process is executing it."""
        lock = self.folder / LOCK
        return lock.is_file() and durable.is_locked(lock)

    @cached_property
    def stages(self) -> dict[str, StageRun]:
        """Every stage that was started, by name."""
        made: dict[str, StageRun] = {}
        for event in self.events:
            name, kind = event.get("stage"), event.get("event")
            if kind == "started" and name:
                outputs = {key: Path(path) for key, path in event.get("outputs", {}).items()}
                made[name] = StageRun(name, outputs)
            elif name:
                before = made.get(name) or StageRun(name, {})
                made[name] = StageRun(
                    name,
                    before.outputs,
                    finished=event if kind == "finished" else before.finished,
                    error=event if kind == "failed" else before.error,
                    work=Path(event["folder"]) if kind == "work" else before.work,
                )
        return made

    @property
    def unfinished(self) -> StageRun | None:
        """The stage that was started last, unless it is finished."""
        last = next(reversed(self.stages.values()), None)
        return last if last is not None and last.finished is None else None

    @property
    def state(self) -> str:
        """`finished`, `running`, `failed at STAGE`, `stopped at STAGE` or `stopped`."""
        if self.figures.get("exit") == 0:
            return "finished"
        if self.is_running:
            return f"running {self.unfinished.name}" if self.unfinished else "running"
        if self.unfinished is None:
            return "stopped"
        return f"{self.unfinished.end} at {self.unfinished.name}"


def every_run(outputs: Path = OUTPUTS) -> list[Run]:
    """Return all runs in a folder of outputs, the newest first."""
    found = filter(None, map(read_run, (outputs / "runs").glob("*/")))
    return sorted(found, key=lambda run: (run.started, run.name), reverse=True)


def read_run(folder: Path) -> Run | None:
    """Return the run in a folder; None if the folder is not named like a run."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return None
    figures: Mapping[str, Any] = {}
    about = {"params": match[2]}
    with suppress(PipelineError):  # one that is missing, or half written
        figures = jsonl.read_json(folder / FIGURES)
    with suppress(PipelineError):
        about = jsonl.read_json(folder / ABOUT)
    started = datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return Run(folder, About.model_validate(about), started, list(_events(folder / JOURNAL)), figures)


def resolve(name: str, outputs: Path = OUTPUTS) -> Path:
    """Return the folder of a run by `latest` (the one started last), its name, a part of that, or its path.

    PipelineError if no run matches, or if several do.
    """
    names = sorted((each.name for each in (outputs / "runs").glob("*/") if _NAME.fullmatch(each.name)), reverse=True)
    if not names:
        raise PipelineError(f"{outputs / 'runs'}: there are no runs; `grpo-pipeline run` makes one")
    path = Path(name)
    wanted = path.resolve().name if path.is_symlink() else path.name  # outputs/latest is a link
    matching = names[:1] if name == LATEST else [each for each in names if each == wanted]
    matching = matching or [each for each in names if wanted and wanted in each]
    if len(matching) == 1:
        return outputs / "runs" / matching[0]
    listed = ", ".join((matching or names)[:_NUM_NAMED]) + (", ..." if len(matching or names) > _NUM_NAMED else "")
    if matching:
        raise PipelineError(f"{name}: {len(matching)} runs have this in their names: {listed}")
    raise PipelineError(f"{name or repr(name)}: no such run in {outputs / 'runs'}; there are {listed}")


def _events(journal: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a journal; a half-written line is skipped."""
    for line in journal.read_text(encoding="utf-8", errors="replace").splitlines() if journal.is_file() else ():
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event
