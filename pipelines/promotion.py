"""Promotion and rollback: the checks before the champion changes, and the record of the change."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from components.register.aliases import CHAMPION, Action, change_alias, check_alias, next_count, rollback_target
from components.register.catalogue import Catalogue, statuses_of
from components.register.registry import POLICY
from components.register.snapshot import Snapshot, Version, read_registry
from components.report.config import GateConfig
from components.report.findings import Evaluation, read_evaluation
from components.report.gate import ChampionOutcomes, compare_with_champion
from components.shared import jsonl, lineage
from components.shared.config import validate
from components.shared.errors import PipelineError, RetryableError
from pipelines.comparison import EVALUATION, Facts, evaluations_of, facts_of, how_to_compare, outcomes
from pipelines.serving import check_served
from pipelines.tables import print_labelled

_PROBES = f"{EVALUATION}/probes.json"


def promote(version: str, registry: str, *, alias: str, reason: str, force: bool, evaluation: Path | None) -> None:
    """Give an alias to a version, unless the version has it already, and print each check as soon as it is done.

    Only the alias `champion` requires more than undamaged files. `evaluation` has an evaluation of the champion on the
    version's problems, by default its own. PipelineError if the version is damaged or, without `force`, fails a check,
    or if the alias is invalid or was given to another version in the meantime.
    """
    check_alias(alias)
    with read_registry(registry) as snapshot:
        candidate = snapshot.version(version)
        count = next_count(snapshot, candidate.name, alias)
        current = snapshot.aliases().get(f"{candidate.name}@{alias}")
        if current == candidate.tag:
            print(f"{version} already has the alias {alias}")
            _update_catalogue(snapshot, candidate)
            return
        record = {"Verified": _verified(snapshot, candidate)}
        failures = []
        checks = _checks(snapshot, facts_of(snapshot, candidate)[0], current, evaluation) if alias == CHAMPION else ()
        for check, passed, line in checks:
            print_labelled(check.lower(), [line if passed else f"FAILED: {line}"])
            record[check] = line
            if not passed:
                failures.append(line)
                if not force:
                    cause, advice = line.partition(": ")[0], "--force promotes it anyway, and records the failure"
                    raise PipelineError(f"{candidate.tag} is not promoted: {cause}; {advice}")
    if failures:
        record["Forced"] = "; ".join(failures)
    if current:
        record["Before"] = current
    _change(registry, candidate, "promote", alias, count, reason, record)


def roll_back(name: str | None, registry: str, *, reason: str) -> None:
    """Make the previous champion of a model the champion again; `name` may be None if there is only one model.

    PipelineError if there is no previous champion, or it is damaged.
    """
    with read_registry(registry) as snapshot:
        names = snapshot.names(name)
        if len(names) != 1:
            raise PipelineError(f"{registry}: has versions of {', '.join(names) or 'no model'}; name one of them")
        (name,) = names
        current = snapshot.aliases().get(f"{name}@{CHAMPION}")
        tag = rollback_target(snapshot, name, CHAMPION)
        if current is None or tag is None:
            reason = f"there is no champion before {current}" if current else "it has no champion"
            raise PipelineError(f"{registry}: {name} cannot be rolled back: {reason}")
        version, count = snapshot.version(tag), next_count(snapshot, name, CHAMPION)
        record = {"Before": current, "Verified": _verified(snapshot, version)}
    _change(registry, version, "rollback", CHAMPION, count, reason, record)


def _change(
    registry: str, version: Version, action: Action, alias: str, count: int, reason: str, record: dict[str, str]
) -> None:
    """Give an alias to a version in the registry, with the record of the checks, and update the Model Registry."""
    change_alias(registry, version, action, alias, count, reason, record)
    previous = f", before it {record['Before']}" if "Before" in record else ""
    forced = f" (forced: {record['Forced']})" if "Forced" in record else ""
    print(f"{version.tag} is the {alias} now{previous}{forced}")
    with read_registry(registry) as snapshot:
        _update_catalogue(snapshot, version)


def _update_catalogue(snapshot: Snapshot, version: Version) -> None:
    """Update the Model Registry in which the newest version of a model was registered, if there is one."""
    (newest,) = snapshot.registrations(snapshot.versions(version.name, withdrawn=True)[-1:])
    address: str | None = newest.get("model_registry")
    if not address:
        return
    try:
        Catalogue(address).update(version.name, statuses_of(snapshot, version.name))
    except PipelineError as error:
        raise type(error)(
            f"{version.name}: changed in {snapshot.location}, but the model registry was not told: {error}; once it "
            f"answers, `models promote {version.tag}` with the same alias tells it"
        ) from None
    print(f"told {address}")


def _verified(snapshot: Snapshot, version: Version) -> str:
    """Verify all files of a version; print and return a line about them. PipelineError if one is damaged."""
    result = snapshot.verify([version])
    if result.faults:
        raise PipelineError("\n".join([f"{version.tag} is damaged, and nothing was changed", *result.faults]))
    line = f"{result.num_files} files, {result.num_bytes:,} bytes, as registered"
    print_labelled("verified", [line])
    return line


def _checks(
    snapshot: Snapshot, facts: Facts, champion: str | None, evaluation: Path | None
) -> Iterator[tuple[str, bool, str]]:
    """Yield the name of each check of a new champion, whether it passed, and a line; the slowest check is the last."""
    has_passed, reasons = facts.verdict["passed"], "; ".join(facts.verdict["reasons"])
    yield "Gate", has_passed, "passed" if has_passed else f"it missed the gate: {reasons}"
    if champion:
        compared = _compared(snapshot, facts, facts_of(snapshot, snapshot.version(champion))[0], evaluation)
        yield "Comparison", *compared
    yield "Serving", *_served(snapshot, facts.version)


def _compared(snapshot: Snapshot, facts: Facts, champion: Facts, evaluation: Path | None) -> tuple[bool, str]:
    """Return whether a version passes the comparison with the champion, in its verdict or by their answers, and why."""
    tag, comparison = champion.version.tag, facts.verdict.get("champion")
    if comparison and comparison["tag"] == tag and comparison["comparable"] and not evaluation:
        return comparison["passed"], comparison["reason"]
    try:
        if evaluation:
            before, (after,) = _evaluation_of(champion, evaluation), evaluations_of(snapshot, facts.version)
        else:
            before, after = evaluations_of(snapshot, champion.version, facts.version)
        counts = outcomes(before, after)
    except RetryableError:
        raise
    except PipelineError as error:
        commands = how_to_compare(champion, facts, snapshot.location)
        option = f"--champion-evaluation FOLDER/{facts.protocol}"
        return False, f"{error}; run `{commands}`, then promote with {option}"
    gate = validate(GateConfig, facts.verdict["gate"], name=f"{facts.version.tag}: verdict.json: gate")
    decision = compare_with_champion(ChampionOutcomes(tag, counts), gate)
    return decision["passed"], decision["reason"]


def _evaluation_of(champion: Facts, folder: Path) -> Evaluation:
    """Return the evaluation in a folder; PipelineError unless it is of the champion's policy."""
    made_by = lineage.read(folder)
    model = made_by.work.inputs.get("model") if made_by else None
    if model is None or model.digest != champion.registration["policy_digest"]:
        raise PipelineError(f"{folder}: is not an evaluation of {champion.version.tag}")
    return read_evaluation(folder)


def _served(snapshot: Snapshot, version: Version) -> tuple[bool, str]:
    """Return whether vLLM serves the policy of a version as it was evaluated, and a line about it."""
    with TemporaryDirectory(prefix="grpo-pipeline-promotion-") as scratch:
        folder = Path(scratch)
        try:
            snapshot.get(version.tag, [POLICY, _PROBES], folder)
            return True, check_served(folder / POLICY, jsonl.read_json(folder / _PROBES))
        except RetryableError:
            raise
        except PipelineError as error:
            return False, str(error)
