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
    """Give an alias to a version, unless it has it already, and print each check as soon as it is done.

    `evaluation` has an evaluation of the champion on the version's problems; None for the champion's own.

    Raises:
        PipelineError: The version is damaged or fails a check, or the alias is invalid or was given to another version
            in the meantime.
    """
    check_alias(alias)
    with read_registry(registry) as snapshot:
        found = snapshot.version(version)
        count, current = next_count(snapshot, found.name, alias), snapshot.aliases().get(f"{found.name}@{alias}")
        if current == found.tag:
            print(f"{version} already has the alias {alias}")
            _update_catalogue(snapshot, found)
            return
        recorded = {"Verified": _verified(snapshot, found)}
        failed = []
        checks = _checks(snapshot, facts_of(snapshot, found)[0], current, evaluation) if alias == CHAMPION else ()
        for name, passed, line in checks:
            print_labelled(name.lower(), [line if passed else f"FAILED: {line}"])
            if not passed:
                failed.append(line)
                if not force:
                    break
            recorded[name] = line
    if failed and not force:
        raise PipelineError(f"{found.tag} is not promoted: {failed[0]}; --force promotes it all the same, on record")
    if failed:
        recorded["Forced"] = "; ".join(failed)
    if current:
        recorded["Before"] = current
    _change(registry, found, "promote", alias, count, reason, recorded)


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
        recorded = {"Before": current, "Verified": _verified(snapshot, version)}
    _change(registry, version, "rollback", CHAMPION, count, reason, recorded)


def _change(
    registry: str, version: Version, action: Action, alias: str, count: int, reason: str, facts: dict[str, str]
) -> None:
    """Give an alias to a version, in the registry and in its Model Registry, and print it."""
    change_alias(registry, version, action, alias, count, reason, facts)
    previous = f", before it {facts['Before']}" if "Before" in facts else ""
    forced = f" (forced: {facts['Forced']})" if "Forced" in facts else ""
    print(f"{version.tag} is the {alias} now{previous}{forced}")
    with read_registry(registry) as snapshot:
        _update_catalogue(snapshot, version)


def _update_catalogue(snapshot: Snapshot, version: Version) -> None:
    """Update the Model Registry to which the newest version of a model was announced, if it was."""
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
    decided = compare_with_champion(ChampionOutcomes(tag, counted), gate)
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
