"""Promotion and rollback: the checks before the champion changes, and the record of the change."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from components.register.aliases import CHAMPION, Change, before, change_alias, check_alias, next_count
from components.register.registry import POLICY
from components.register.snapshot import Snapshot, Version, read_registry
from components.report.config import GateConfig
from components.report.findings import Evaluation, read_evaluation
from components.report.gate import ChampionOutcomes, against
from components.shared import jsonl, lineage
from components.shared.config import validate
from components.shared.errors import PipelineError, RetryableError
from pipelines.comparison import EVALUATION, Facts, evaluations_of, facts_of, how_to_compare, outcomes
from pipelines.serving import check_served
from pipelines.tables import print_labelled

_PROBES = f"{EVALUATION}/probes.json"


def promote(
    location: str, spec: str, *, alias: str, reason: str, force: bool, evaluation: Path | None
) -> Change | None:
    """Give an alias to a version of a registry; return the change, or None where the version has the alias already.

    `evaluation` has an evaluation of the champion on the version's problems; None for the champion's own. The outcome
    of each check is printed as soon as it is known.

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
        failed = []
        checks = _checks(snapshot, facts_of(snapshot, version)[0], current, evaluation) if alias == CHAMPION else ()
        for name, passed, line in checks:
            print_labelled(name.lower(), [line if passed else f"FAILED: {line}"])
            if not passed:
                failed.append(line)
                if not force:
                    break
            recorded[name] = line
    if failed and not force:
        raise PipelineError(f"{version.tag} is not promoted: {failed[0]}; --force promotes it all the same, on record")
    if failed:
        recorded["Forced"] = "; ".join(failed)
    if current:
        recorded["Before"] = current
    return change_alias(location, version, "promote", alias, count, reason, recorded)


def roll_back(location: str, name: str | None, *, reason: str) -> Change:
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
    return change_alias(location, version, "rollback", CHAMPION, count, reason, recorded)


def _verified(snapshot: Snapshot, version: Version) -> str:
    """Verify a version, and return and print what was read."""
    read = snapshot.verify([version])
    if read.faults:
        raise PipelineError("\n".join([f"{version.tag} is damaged, and nothing was changed", *read.faults]))
    line = f"{read.num_files} files, {read.num_bytes:,} bytes, as registered"
    print_labelled("verified", [line])
    return line


def _checks(
    snapshot: Snapshot, facts: Facts, champion: str | None, evaluation: Path | None
) -> Iterator[tuple[str, bool, str]]:
    """Yield the checks of a champion, the longest last: the name, whether it passed, and a line."""
    verdict = facts.verdict
    missed = "it missed the gate: " + "; ".join(verdict["reasons"])
    yield "Gate", verdict["passed"], "passed" if verdict["passed"] else missed
    if champion:
        compared = _compared(snapshot, facts, facts_of(snapshot, snapshot.version(champion))[0], evaluation)
        yield "Comparison", *compared
    yield "Serving", *_served(snapshot, facts.version)


def _compared(snapshot: Snapshot, facts: Facts, champion: Facts, evaluation: Path | None) -> tuple[bool, str]:
    """Compare a version with the champion by its gate: by its verdict, otherwise by the records of both."""
    tag, said = champion.version.tag, facts.verdict.get("champion")
    if said and said["tag"] == tag and said["comparable"] and not evaluation:
        return said["passed"], said["reason"]
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
        return False, f"{error}; run `{commands}`, then promote with {option}"
    gate = validate(GateConfig, facts.verdict["gate"], name=f"{facts.version.tag}: verdict.json: gate")
    decided = against(ChampionOutcomes(tag, counted), gate)
    return decided["passed"], decided["reason"]


def _evaluation_of(champion: Facts, folder: Path) -> Evaluation:
    """Return the evaluation in a folder; PipelineError unless it is of the champion's policy."""
    made_by = lineage.read(folder)
    model = made_by.work.inputs.get("model") if made_by else None
    if model is None or model.digest != champion.registration["policy_digest"]:
        raise PipelineError(f"{folder}: is not an evaluation of {champion.version.tag}")
    return read_evaluation(folder)


def _served(snapshot: Snapshot, version: Version) -> tuple[bool, str]:
    with TemporaryDirectory(prefix="grpo-pipeline-promotion-") as scratch:
        folder = Path(scratch)
        try:
            snapshot.get(version.tag, [POLICY, _PROBES], folder)
            return True, check_served(folder / POLICY, jsonl.read_json(folder / _PROBES))
        except RetryableError:
            raise
        except PipelineError as error:
            return False, str(error)
