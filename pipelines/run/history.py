"""The runs on this machine, read from their folders.

<outputs>/runs/<name>/   about.json (params file, note and tags), params.yaml, journal.jsonl, run.log, artifacts/;
                         report.html and summary.json once the report is made; `run.lock` is locked during the run
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from components.shared import durable, jsonl
from components.shared.errors import PipelineError, RetryableError
from pipelines.tables import listed

OUTPUTS = Path("outputs")
PARAMS, JOURNAL, LOG, ARTIFACTS, LOCK = "params.yaml", "journal.jsonl", "run.log", "artifacts", "run.lock"
PAGE, FIGURES, ABOUT = "report.html", "summary.json", "about.json"
_NAME = re.compile(r"(\d{8}T\d{6}Z)-(.+)")


class About(BaseModel):
    """Content of about.json."""

    model_config = ConfigDict(frozen=True)

    params: str
    """Name of the params file, without its suffix."""
    note: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageRun:
    """One stage of a run, finished or not."""

    name: str
    outputs: Mapping[str, Path]
    """Folder of each output; complete only if the stage is finished."""
    finished: Mapping[str, Any] | None = None
    """Event `finished` of the journal; None until then."""
    error: Mapping[str, Any] | None = None
    """Event `failed` of the journal; None if the stage succeeded or was killed."""
    work: Path | None = None
    """Folder of its checkpoints while it is unfinished, if the stage has one."""

    @property
    def seconds(self) -> float | None:
        """Duration in the run that computed the outputs; None if the stage is not finished."""
        return None if self.finished is None else self.finished.get("seconds", 0.0)

    @property
    def end(self) -> str:
        """How an unfinished stage ended: `failed`, or `stopped` if it was killed or may succeed when it is resumed."""
        exit_code = (self.error or {}).get("exit_code", RetryableError.exit_code)
        return "stopped" if exit_code == RetryableError.exit_code else "failed"

    @property
    def reused_from(self) -> str | None:
        """Name of the earlier run whose outputs it reuses; None if it computed them or is not finished."""
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
        """Name of its folder: start time and a name."""
        return self.folder.name

    @property
    def verdict(self) -> Mapping[str, Any]:
        """Verdict of the gate; empty without a report."""
        return self.figures.get("verdict") or {}

    @property
    def version(self) -> Mapping[str, Any]:
        """Registered version; empty if it registered none."""
        return self.figures.get("version") or {}

    @property
    def files(self) -> dict[str, str]:
        """Paths of its files that exist, by label."""
        names = {"report": PAGE, "figures": FIGURES, "params": PARAMS, "journal": JOURNAL, "log": LOG}
        return {label: str(self.folder / name) for label, name in names.items() if (self.folder / name).is_file()}

    @cached_property
    def is_running(self) -> bool:
        """Whether a process is executing it, when first asked."""
        lock = self.folder / LOCK
        return lock.is_file() and durable.is_locked(lock)

    @cached_property
    def stages(self) -> dict[str, StageRun]:
        """The stages that have events, by name, in the order of their first event."""
        stages: dict[str, StageRun] = {}
        for event in self.events:
            name = event["stage"]
            stage = stages.get(name, StageRun(name, {}))
            match event.get("event"):
                case "started":
                    outputs = {key: Path(path) for key, path in event.get("outputs", {}).items()}
                    stage = StageRun(name, outputs)
                case "finished":
                    stage = replace(stage, finished=event)
                case "failed":
                    stage = replace(stage, error=event)
                case "work":
                    stage = replace(stage, work=Path(event["folder"]))
                case _:  # a message, perhaps of a part of a stage, such as vllm
                    continue
            stages[name] = stage
        return stages

    @property
    def unfinished(self) -> StageRun | None:
        """The last stage that started, unless it is finished."""
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
    runs = filter(None, map(read_run, (outputs / "runs").glob("*/")))
    return sorted(runs, key=lambda run: (run.started, run.name), reverse=True)


def read_run(folder: Path) -> Run | None:
    """Return the run in a folder; None if the folder is not named like a run."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return None
    figures: Mapping[str, Any] = {}
    about = {"params": match[2]}
    with suppress(PipelineError):  # missing, or half written
        figures = jsonl.read_json(folder / FIGURES)
    with suppress(PipelineError):
        about = jsonl.read_json(folder / ABOUT)
    started = datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return Run(folder, About.model_validate(about), started, list(_events(folder / JOURNAL)), figures)


def resolve(name: str, outputs: Path = OUTPUTS) -> Run:
    """Return the run with this path, name or part of a name, or `latest`; PipelineError if none or several match."""
    names = sorted((each.name for each in (outputs / "runs").glob("*/") if _NAME.fullmatch(each.name)), reverse=True)
    if not names:
        raise PipelineError(f"{outputs / 'runs'}: there are no runs; `grpo-pipeline run` makes one")
    # outputs/latest is a link to the folder of a run.
    run_name = Path(name).resolve().name if Path(name).is_symlink() else Path(name).name
    if name == "latest":
        run_name = names[0]
    matching = [each for each in names if run_name in each] if run_name else []
    if run_name in names:
        matching = [run_name]
    if len(matching) == 1:
        run = read_run(outputs / "runs" / matching[0])
        assert run is not None  # its name has the form of a run's
        return run
    if matching:
        raise PipelineError(f"{name}: {len(matching)} runs have this in their names: {listed(matching)}")
    raise PipelineError(f"no run `{name}` in {outputs / 'runs'}; the runs there are {listed(names)}")


def _events(journal: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the events of stages in a journal; a half-written line is skipped."""
    text = journal.read_text(encoding="utf-8", errors="replace") if journal.is_file() else ""
    for line in text.splitlines():
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "stage" in event:
                yield event
