"""Before a run: which stages it will reuse from earlier runs, which it will compute, and why."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from components.preflight.config import STAGES, Params
from components.report.formatting import duration
from components.shared.config import Config
from components.shared.lineage import Fingerprint, differences, fingerprint
from components.shared.results import Record, Result, damage, external_change, other_settings, read_record
from components.shared.stage import WORK, Stage
from components.shared.work import fingerprint_in, is_in_use, last_step, work_folder
from pipelines.run.history import Run
from pipelines.run.stages import load_stage
from pipelines.tables import listed

_NEVER_FINISHED = "no earlier run of this params file has finished it"


@dataclass(frozen=True)
class Expectation:
    """What a run will do with one stage."""

    stage: str
    reused_from: str | None
    """Run whose outputs it reuses; None if it is computed."""
    reason: str
    """Why it is computed; empty if it is reused."""
    seconds: float | None = None
    """Duration in the latest run that finished it; None if there is none."""
    step: int | None = None
    """Step of unfinished work after which it resumes; None if it starts from the beginning."""
    num_steps: int | None = None
    """Training steps in all; None for other stages."""
    ignored: Sequence[str] = ()
    """Keys that were set otherwise in the run whose outputs it reuses."""

    def __str__(self) -> str:
        if self.reused_from:
            ignored = f", although {listed(self.ignored)} changed; --from {self.stage} runs it" if self.ignored else ""
            return f"unchanged: from {self.reused_from}{ignored}"
        before = f"; took {duration(self.seconds)} the last time" if self.seconds is not None else ""
        step = f"; resumes after step {self.step} of {self.num_steps}" if self.step is not None else ""
        return f"runs: {self.reason}{step}{before}"


def records(stage: str) -> list[tuple[Fingerprint, list[Result]]]:
    """Return the fingerprint and the results of each finished work of a stage on this machine, the latest first."""
    paths = sorted((WORK / stage).glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [read_record(path) for path in paths]


def expectations(params: Params, like: Sequence[Run], *, fresh_from: str = "") -> list[Expectation]:
    """Return what a run will do with each stage, if it computes all stages from `fresh_from` on.

    Outputs may be reused from any run. The runs in `like` have the same params file, the latest first: durations come
    from them, reasons also from runs whose outputs they reused.
    """
    fresh = STAGES[STAGES.index(fresh_from) :] if fresh_from else ()
    reused: dict[str, Result] = {}  # `_expected` adds to it
    expected = []
    for name in STAGES:
        config = getattr(params, name)
        expectation = _expected(load_stage(name), config, reused, like, is_fresh=name in fresh)
        durations = [run.stages[name].seconds for run in like if name in run.stages]
        latest_s = next((seconds for seconds in durations if seconds is not None), None)
        expected.append(replace(expectation, seconds=latest_s, num_steps=getattr(config, "num_steps", None)))
    return expected


def _expected(
    stage: Stage, config: Config, reused: dict[str, Result], like: Sequence[Run], *, is_fresh: bool
) -> Expectation:
    """Return the expectation of one stage; if it reuses a result, add this to `reused`, the results by stage."""
    comparable = {run.name for run in like} | {each.reused_from for run in like for each in run.stages.values()}
    sources = {name: source.split("/") for name, source in stage.inputs.items()}  # its stage, and the output there
    inputs = {name: reused[maker].digests[output] for name, (maker, output) in sources.items() if maker in reused}
    computed_before = dict.fromkeys(maker for maker, _ in sources.values() if maker not in reused)
    work = fingerprint(stage.name, config, inputs, stage.sources(config))
    reason = ""
    if stage.never_reused or is_fresh:
        reason = stage.never_reused or "requested"
    elif computed_before:
        # Not the difference from an earlier run: this may have had other settings of the earlier stages, too.
        reason = f"{' and '.join(computed_before)} will run" if _latest(stage, comparable) else _NEVER_FINISHED
    else:
        as_json = config.model_dump(mode="json")
        for result in Record(WORK, stage.name, work).results():
            defect = external_change(result) or damage(result)
            if not defect:
                reused[stage.name] = result
                return Expectation(stage.name, result.run, "", ignored=other_settings(result, stage.name, as_json))
            reason = reason or defect
        reason = reason or _unused(stage, work, like) or _difference(stage, work, comparable)
    folder = work_folder(WORK, stage.name, work)
    can_resume = not computed_before and folder.is_dir() and not is_in_use(folder)
    return Expectation(stage.name, None, reason, step=last_step(folder) if can_resume else None)


def _unused(stage: Stage, work: Fingerprint, like: Sequence[Run]) -> str:
    """Return how work differs from what the latest run left unfinished in the stage; empty if it does not."""
    unfinished = like[0].unfinished if like else None
    if unfinished is None or unfinished.name != stage.name or unfinished.work is None:
        return ""
    step, before = last_step(unfinished.work), fingerprint_in(unfinished.work)
    difference = differences(stage.name, before, work) if step is not None else ""
    return f"step {step} of {like[0].name} is not used: {difference}" if difference else ""


def _difference(stage: Stage, work: Fingerprint, comparable: Collection[str | None]) -> str:
    """Return how work differs from the latest work of a comparable run; empty if it does not."""
    latest = _latest(stage, comparable)
    if latest is None:
        return _NEVER_FINISHED
    before, run = latest
    difference = differences(stage.name, before, work)
    return f"{difference} compared with {run}" if difference else ""


def _latest(stage: Stage, comparable: Collection[str | None]) -> tuple[Fingerprint, str] | None:
    """Return the fingerprint of the latest work of a comparable run, and this run's name; None if there is none."""
    for before, results in records(stage.name):
        run = next((result.run for result in results if result.run in comparable), None)
        if run:
            return before, run
    return None
