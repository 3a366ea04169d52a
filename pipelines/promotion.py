"""Promotion and rollback: the checks before the champion changes, and the record of the change."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from components.register.aliases import CHAMPION, Action, Change, before, change_alias, check_alias, next_count
from components.register.registry import POLICY
from components.register.snapshot import Snapshot, Version, read_registry
from components.report.config import GateConfig
from components.report.findings import Evaluation, read_evaluation
from components.report.gate import ChampionOutcomes, against
from components.shared import jsonl, lineage
from components.shared.config import validate
from components.shared.errors import PipelineError, RetryableError
from components.shared.execution import person
from pipelines.comparison import EVALUATION, Facts, evaluations_of, facts_of, how_to_compare, outcomes
from pipelines.serving import check_served

_PROBES = f"{EVALUATION}/probes.json"


class Check(NamedTuple):
    """One condition of a promotion."""

    name: str
    passed: bool
    line: str


def promote(
    location: str,
    spec: str,
    *,
    alias: str,
    reason: str,
    force: bool,
    evaluation: Path | None,
    show: Callable[[str, str], None],
) -> Change | None:
    """Give an alias to a version of a registry; return the change, or None where the version has the alias already.

    `evaluation` has an evaluation of the champion on the version's problems; None for the champion's own. `show` takes
    the name and the outcome of each check as soon as it is known.

    Raises:
        PipelineError: The version is damaged or fails a check, or the alias is invalid or was given to another version
            in the meantime.
    """
    check_alias(alias)
    with read_registry(location) as snapshot:
        version = snapshot.version(spec)
        count, current = next_count(snapshot, version.name, alias), snapshot.aliases().get(f"{version.name}@{alias}")
        if current == version.tag:
            return None
        recorded = {"Verified": _verified(snapshot, version)}
        show("Verified", recorded["Verified"])
        failed = []
        checks = _checks(snapshot, facts_of(snapshot, version)[0], current, evaluation) if alias == CHAMPION else ()
        for check in checks:
            show(check.name, check.line if check.passed else f"FAILED: {check.line}")
            if not check.passed:
                failed.append(check.line)
                if not force:
                    break
            recorded[check.name] = check.line
    if failed and not force:
        raise PipelineError(f"{version.tag} is not promoted: {failed[0]}; --force promotes it all the same, on record")
    if failed:
        recorded["Forced"] = "; ".join(failed)
    if current:
        recorded["Before"] = current
    return _change(location, version, "promote", alias, count, reason, recorded)


def roll_back(location: str, name: str | None, *, reason: str, show: Callable[[str, str], None]) -> Change:
    """Make the previous champion of a model the champion again; `name` may be None if there is only one model.

    PipelineError if there is no previous champion, or it is damaged.
    """
    with read_registry(location) as snapshot:
        names = snapshot.names(name)
        if len(names) != 1:
            raise PipelineError(f"{location}: has versions of {', '.join(names) or 'no model'}; name one of them")
        (name,) = names
        current = snapshot.aliases().get(f"{name}@{CHAMPION}")
        tag = before(snapshot, name, CHAMPION)
        if current is None or tag is None:
            reason = f"there is no champion before {current}" if current else "it has no champion"
            raise PipelineError(f"{location}: {name} cannot be rolled back: {reason}")
        version, count = snapshot.version(tag), next_count(snapshot, name, CHAMPION)
        recorded = {"Before": current, "Verified": _verified(snapshot, version)}
        show("Verified", recorded["Verified"])
    return _change(location, version, "rollback", CHAMPION, count, reason, recorded)


def _change(
    location: str, version: Version, action: Action, alias: str, count: int, reason: str, facts: dict[str, str]
) -> Change:
    change = Change(action, version.tag, alias, count, datetime.now(UTC), person(), reason, facts)
    change_alias(location, version, change)
    return change


def _verified(snapshot: Snapshot, version: Version) -> str:
    read = snapshot.verify([version])
    if read.faults:
        raise PipelineError("\n".join([f"{version.tag} is damaged, and nothing was changed", *read.faults]))
    return f"{read.num_files} files, {read.num_bytes:,} bytes, as registered"


def _checks(snapshot: Snapshot, facts: Facts, champion: str | None, evaluation: Path | None) -> Iterator[Check]:
    """Yield the checks of a champion, the longest last."""
    verdict = facts.verdict
    missed = "it missed the gate: " + "; ".join(verdict["reasons"])
    yield Check("Gate", verdict["passed"], "passed" if verdict["passed"] else missed)
    if champion:
        yield _compared(snapshot, facts, facts_of(snapshot, snapshot.version(champion))[0], evaluation)
    yield _served(snapshot, facts.version)


def _compared(snapshot: Snapshot, facts: Facts, champion: Facts, evaluation: Path | None) -> Check:
    """Compare a version with the champion by its gate: by its verdict, otherwise by the records of both."""
    tag, said = champion.version.tag, facts.verdict.get("champion")
    if said and said["tag"] == tag and said["comparable"] and not evaluation:
        return Check("Comparison", said["passed"], said["reason"])
    try:
        if evaluation:
            before, (after,) = _evaluation_of(champion, evaluation), evaluations_of(snapshot, facts.version)
        else:
            before, after = evaluations_of(snapshot, champion.version, facts.version)
        counted = outcomes(before, after)
    except RetryableError:
        raise
    except PipelineError as error:
        commands = how_to_compare(champion, facts, snapshot.location)
        option = f"--champion-evaluation FOLDER/{facts.protocol}"
        return Check("Comparison", False, f"{error}; run `{commands}`, then promote with {option}")
    gate = validate(GateConfig, facts.verdict["gate"], name=f"{facts.version.tag}: verdict.json: gate")
    decided = against(ChampionOutcomes(tag, counted), gate)
    return Check("Comparison", decided["passed"], decided["reason"])


def _evaluation_of(champion: Facts, folder: Path) -> Evaluation:
    """Return the evaluation in a folder; PipelineError unless it is of the champion's policy."""
    made_by = lineage.read(folder)
    model = made_by.work.inputs.get("model") if made_by else None
    if model is None or model.digest != champion.registration["policy_digest"]:
        raise PipelineError(f"{folder}: is not an evaluation of {champion.version.tag}")
    return read_evaluation(folder)


def _served(snapshot: Snapshot, version: Version) -> Check:
    with TemporaryDirectory(prefix="grpo-pipeline-promotion-") as scratch:
        folder = Path(scratch)
        try:
            snapshot.get(version.tag, [POLICY, _PROBES], folder)
            served = check_served(folder / POLICY, jsonl.read_json(folder / _PROBES))
        except RetryableError:
            raise
        except PipelineError as error:
            return Check("Serving", False, str(error))
    return Check("Serving", True, str(served))
