"""What a run will do before it does it: which stages it takes from earlier runs, which it computes, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.preflight.config import STAGES, Params
from components.shared import durable, lineage, reuse
from components.shared.config import Config, without_operational
from components.shared.reuse import Finished
from components.shared.work import fingerprint_in, last_step
from pipelines.run.history import Run
from pipelines.run.screen import duration

_NEVER_REUSED = {"report": "reads the registry", "register": "writes to the registry"}
_NEVER_FINISHED = "no earlier run of this file has finished it"
_NUM_OFFERED = 20
"""Finished stages of earlier runs that are looked at, the newest first."""
_WORK = Path("outputs/work")


@dataclass(frozen=True)
class Expectation:
    """What is expected of one stage."""

    stage: str
    reused_from: str | None
    """Run whose outputs it takes; None where it is computed."""
    reason: str
    """Why it is computed; empty where it is not."""
    seconds: float | None = None
    """What it took the last time; None where it has never been finished."""
    step: int | None = None
    """Step of unfinished work after which it goes on; None where it starts afresh."""
    num_steps: int | None = None
    """Steps that it takes in all; None for a stage without steps."""

    def __str__(self) -> str:
        if self.reused_from:
            return f"unchanged: from {self.reused_from}"
        before = f"; took {duration(self.seconds)} before" if self.seconds is not None else ""
        of = f" of {self.num_steps}" if self.num_steps else ""
        step = f"; goes on after step {self.step}{of}" if self.step is not None else ""
        return f"runs: {self.reason}{step}{before}"


def offers(runs: Sequence[Run], *, before: str = "") -> dict[str, list[Finished]]:
    """Return what runs, the newest first, offer to the stages before one (`before`; all without it) by stage."""
    names = STAGES[: STAGES.index(before)] if before else STAGES
    return {name: _finished(runs, name)[:_NUM_OFFERED] if name not in _NEVER_REUSED else [] for name in names}


def _finished(runs: Sequence[Run], name: str) -> list[Finished]:
    stages = ((run.name, run.stages[name]) for run in runs if name in run.stages)
    return [
        Finished.model_validate({"run": stage.reused_from or run, "outputs": stage.outputs, **stage.finished})
        for run, stage in stages
        if stage.finished and "digests" in stage.finished
    ]


def expectations(
    params: Params,
    like: Sequence[Run],
    offered: Mapping[str, Sequence[Finished]],
    *,
    asked: str = "",
) -> list[Expectation]:
    """Return what a run is expected to do at each stage; `asked` says why stages without an offer are computed.

    Reasons and times are those of the runs `like` it, of the same params file: what differs from any other run, and how
    long that took, says nothing. Outputs are taken from whichever run offers them.
    """
    known = {name for run in like for name in (run.name, *(stage.reused_from for stage in run.stages.values()))}
    taken: dict[str, Finished] = {}
    expected = []
    for stage in STAGES:
        config: Config = getattr(params, stage)
        reasons: list[str] = []
        for earlier in offered.get(stage, ()):
            difference = _difference(stage, config, earlier, taken)
            if not difference:
                taken[stage] = earlier
                break
            if earlier.run in known:
                reasons.append(difference)
        reasons += [_NEVER_REUSED.get(stage) or ("" if stage in offered else asked) or _NEVER_FINISHED]
        if stage in taken:
            expected.append(Expectation(stage, taken[stage].run, ""))
            continue
        before = next((each.seconds for each in _finished(like, stage)), None)
        step, num_steps = _saved_step(stage, config, taken), getattr(config, "num_steps", None)
        expected.append(Expectation(stage, None, reasons[0], before, step, num_steps))
    return expected


def _difference(stage: str, config: Config, earlier: Finished, taken: Mapping[str, Finished]) -> str:
    """Why a stage cannot take what an earlier run has finished; empty where it can."""
    made_by = reuse.made_by_of(earlier)
    if made_by is None:
        return f"the outputs of {earlier.run} are gone"
    inputs, computed = {}, []
    for name, each in made_by.work.inputs.items():
        maker = made_by.maker(each)
        inputs[name] = each.digest
        if maker and maker.stage not in taken:
            computed.append(maker.stage)
        elif maker and each.digest not in taken[maker.stage].digests.values():
            inputs[name] = ""
    own = reuse.difference(stage, config, inputs, earlier)
    return own or ", ".join(f"after {name}" for name in dict.fromkeys(computed)) or reuse.damaged(earlier)


def _saved_step(stage: str, config: Config, taken: Mapping[str, Finished]) -> int | None:
    """The last step of unfinished work with the same settings and code, on inputs that are taken over."""
    digests = {digest for each in taken.values() for digest in each.digests.values()}
    wanted: dict[str, Any] = {"config": without_operational(config), "files": lineage.stage_files(stage)}
    steps = []
    for folder in (_WORK / stage).glob("[!.]*/"):
        recorded = fingerprint_in(folder) or {}
        same = all(recorded.get(key) == value for key, value in wanted.items())
        if same and set(recorded["inputs"].values()) <= digests and not durable.is_locked(folder / "run.lock"):
            steps.append(last_step(folder))
    return max((step for step in steps if step is not None), default=None)
