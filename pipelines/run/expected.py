"""Before a run: which stages it will reuse from earlier runs, which it will compute, and why."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from components.preflight.config import STAGES, Params
from components.shared.config import Config
from components.shared.lineage import Fingerprint, differences, fingerprint
from components.shared.results import Record, Result, changed, damaged, read_record
from components.shared.stage import WORK, Stage
from components.shared.work import is_in_use, last_step, work_folder
from pipelines.run.history import Run
from pipelines.run.screen import duration
from pipelines.run.stages import declared

_NEVER_FINISHED = "no earlier run of this params file has finished it"


@dataclass(frozen=True)
class Expectation:
    """The expectation of one stage."""

    stage: str
    reused_from: str | None
    """Run whose outputs it reuses; None if it is computed."""
    reason: str
    """Why it is computed; empty if it is reused."""
    seconds: float | None = None
    """Duration the last time; None if it was never finished."""
    step: int | None = None
    """Step of unfinished work after which it resumes; None if it starts from the beginning."""
    num_steps: int | None = None

    def __str__(self) -> str:
        if self.reused_from:
            return f"unchanged: from {self.reused_from}"
        before = f"; took {duration(self.seconds)} before" if self.seconds is not None else ""
        step = f"; goes on after step {self.step} of {self.num_steps}" if self.step is not None else ""
        return f"runs: {self.reason}{step}{before}"


def records(stage: str) -> list[tuple[Fingerprint, list[Result]]]:
    """Return the records of a stage's finished work, the latest first."""
    paths = sorted((WORK / stage).glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [read_record(path) for path in paths]


def expectations(params: Params, like: Sequence[Run], *, fresh_from: str = "") -> list[Expectation]:
    """Return the expectation of each stage of a run that computes all stages from `fresh_from` on.

    Reasons and times come from the runs `like` it, of the same params file; differences from other runs would say
    little. Outputs are reused from any run.
    """
    known = {name for run in like for name in (run.name, *(stage.reused_from for stage in run.stages.values()))}
    fresh = STAGES[STAGES.index(fresh_from) :] if fresh_from else ()
    taken: dict[str, Result] = {}
    expected = []
    for name in STAGES:
        stage, config = declared(name), getattr(params, name)
        each = _expected(stage, config, taken, known, is_fresh=name in fresh)
        seconds = (run.stages[name].seconds for run in like if name in run.stages)
        before = next((each for each in seconds if each is not None), None)
        expected.append(replace(each, seconds=before, num_steps=getattr(config, "num_steps", None)))
    return expected


def _expected(
    stage: Stage, config: Config, taken: dict[str, Result], known: Collection[str | None], *, is_fresh: bool
) -> Expectation:
    """Return the expectation of one stage; `taken` has the results that earlier stages reuse, and gets its result."""
    makers = {name: source.split("/") for name, source in stage.inputs.items()}
    inputs = {name: taken[maker].digests[output] for name, (maker, output) in makers.items() if maker in taken}
    computed = dict.fromkeys(maker for maker, _ in makers.values() if maker not in taken)
    work = fingerprint(stage.name, config, inputs, stage.sources(config))
    if stage.never_reused or is_fresh:
        reason = stage.never_reused or "asked for"
    elif computed:
        reason = _difference(stage, work, known, unknown=f"after {', '.join(computed)}")
    else:
        results = [each for each in Record(WORK, stage.name, work).results() if each.outputs.keys() == {*stage.outputs}]
        wrong = [changed(each) or damaged(each) for each in results]
        found = next((each for each, reason in zip(results, wrong, strict=True) if not reason), None)
        if found:
            taken[stage.name] = found
            return Expectation(stage.name, found.run, "")
        reason = next(iter(wrong), "") or _difference(stage, work, known)
    folder = work_folder(WORK, stage.name, work)
    can_resume = not computed and folder.is_dir() and not is_in_use(folder)
    return Expectation(stage.name, None, reason, step=last_step(folder) if can_resume else None)


def _difference(stage: Stage, work: Fingerprint, known: Collection[str | None], *, unknown: str = "") -> str:
    """Return how the work differs from the latest that a known run has finished, or `unknown` where it does not.

    Inputs that are yet to be made are not in `work`, and are taken to be the same.
    """
    for before, results in records(stage.name):
        if any(each.run in known for each in results):
            inputs = {**before["inputs"], **work["inputs"]}
            return differences(stage.name, before, {**work, "inputs": inputs}) or unknown
    return _NEVER_FINISHED
