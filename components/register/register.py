"""The register stage: a policy that passed the gate becomes a version, bundled with everything it was made from.

Registering the same weights twice gives the same version; a run killed at any point is completed by the next one.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from components.register.aliases import CANDIDATE, candidate
from components.register.card import CARD, model_card
from components.register.catalogue import Catalogue, Entry, entry_of, require_url, statuses_of, unannounced
from components.register.config import RegisterConfig
from components.register.consistency import check_consistency, require_stored
from components.register.registry import POLICY, RefusedError, Registry, open_registry
from components.register.snapshot import DIGESTS_FILE, FORMAT, VERSION_FILE, Snapshot
from components.register.test_set_uses import count_test_set_use
from components.shared import jsonl, lineage
from components.shared.config import keys_with_secrets
from components.shared.environment import RUN_ID_VARIABLE, RUN_NAME_VARIABLE
from components.shared.errors import GateMissedError, PipelineError, RetryableError
from components.shared.execution import Revision, person
from components.shared.progress import say, say_line
from components.shared.stage import Stage
from components.shared.versioning import is_url

ADDRESSES_FILE = "addresses.json"
"""File of a registration with up to two URLs: `storage`, and `served`, where the weights are as plain files."""
_ATTEMPTS = 10
"""Maximum number of pushes to a registry that others change at the same time."""
_PULL_REQUEST = "pull_request.md"
_REPORT_FILES = ("verdict", "summary", "provenance")
_INPUTS = {
    "policy": "train_grpo/policy",
    "reference": "train_sft/reference",
    "base_model": "train_sft/base_model",
    "problems": "prepare_data/problems",
    "evaluation": "evaluate/evaluation",
    "grpo_training": "train_grpo/training",
    "sft_training": "train_sft/training",
}
_FOLDERS = {name: name for name in _INPUTS} | {"policy": POLICY, "grpo_training": "training"}
"""Folder of a version for each input."""


class ProposedError(PipelineError):
    """The version is only proposed, on a branch for a pull request."""

    keeps_outputs = True


class Registered(NamedTuple):
    """The version of a policy, and how it was registered."""

    version: dict[str, Any]
    """Its version.json."""
    is_new: bool
    pull_request: str | None = None
    """Title and text of the pull request to open; None unless the registry's branch is protected."""
    has_tag: bool = True
    """Whether the registry accepted the version's tag; without it the version is only proposed."""


def register(config: RegisterConfig, *, report: Path, registration: Path, **folders: Path) -> dict[str, float]:
    """Enforce the gate's verdict and register the policy as a new version unless its weights already are one."""
    results = {name: jsonl.read_json(report / f"{name}.json") for name in _REPORT_FILES}
    digests = check_consistency(report, results, folders)
    verdict = results["verdict"]
    # A policy that missed the gate has used the test problems as well.
    count_test_set_use(config.registry, config.name, digests["policy"], verdict)
    _enforce_gate(verdict)
    if not results["summary"].get("learned", True):
        say("register", "warning: GRPO learned nothing: the policy has the weights of its reference")
    # Connect before anything is registered: a wrong address is an error while there is nothing to undo.
    catalogue = Catalogue(config.model_registry) if config.model_registry else None
    with open_registry(config.registry, config.storage, config.storage_endpoint) as registry:
        if catalogue:
            require_url(registry.storage_url())
        if known := registry.find(config.name, digests["policy"]):
            registered = Registered(known, is_new=False)
        else:
            registered = _register(config, registry, report, folders, digests, results)
        version = registered.version
        _ensure_candidate(registry, version, verdict)
        for name in (CARD, DIGESTS_FILE):
            (registration / name).write_text(registry.read(version["tag"], name), encoding="utf-8")
        entries = _entries(registry, catalogue, registered)
        statuses = statuses_of(registry, config.name)
        addresses = {"storage": registry.storage_url(), "served": entries[-1].uri if entries else ""}
    # Leave out folders, and a URL of the registry's config that has a password.
    public = {name: url for name, url in addresses.items() if is_url(url) and not list(keys_with_secrets(url))}
    jsonl.write_json(registration / ADDRESSES_FILE, public)
    jsonl.write_json(registration / VERSION_FILE, version)
    if registered.pull_request:
        (registration / _PULL_REQUEST).write_text(registered.pull_request, encoding="utf-8")
        say("register", f"{config.registry} protects its branch: open a pull request from {_branch(version)}")
        say_line(registered.pull_request)
    if not registered.has_tag:
        raise ProposedError(
            f"{config.registry}: accepts neither {version['tag']} nor a push to its branch; the version is on the "
            f"branch {_branch(version)}, and registered once somebody has merged it and pushed the tag, as "
            f"{_PULL_REQUEST} says"
        )
    done = "registered" if registered.is_new else "is already registered"
    say("register", f"{version['tag']} {done} in {config.registry}")
    if catalogue:
        _announce(catalogue, entries)
        catalogue.update(config.name, statuses)
    return {"registered": float(registered.is_new), "gate_passed": float(verdict["passed"])}


STAGE = Stage(
    name="register",
    function=register,
    config=RegisterConfig,
    inputs={**_INPUTS, "report": "report/report"},
    outputs=("registration",),
    never_reused="always, as it writes to the registry",
)


def _enforce_gate(verdict: Mapping[str, Any]) -> None:
    """Raise GateMissedError if the policy missed a gate that is enforced."""
    if verdict["passed"]:
        return
    if verdict["enforced"]:
        raise GateMissedError(f"the policy missed the gate and was not registered: {'; '.join(verdict['reasons'])}")
    say("register", "the policy missed the gate, which is not enforced")


def _register(
    config: RegisterConfig,
    registry: Registry,
    report: Path,
    folders: Mapping[str, Path],
    digests: Mapping[str, str],
    results: Mapping[str, Any],
) -> Registered:
    """Register the policy as the next version and return it; if its push is refused, propose it by a pull request.

    If others register the same weights in the meantime, their version is returned.
    """
    stored = registry.store({folder: folders[name] for name, folder in _FOLDERS.items()})
    for name, folder in _FOLDERS.items():
        require_stored(name, folder, stored.digests, digests[name])
    files: dict[str, str | Path] = {file.name: file for file in sorted(report.iterdir()) if file.is_file()}
    made_by = lineage.read(folders["policy"])
    pipeline_commit = (made_by and made_by.revision()) or Revision()
    for _ in range(_ATTEMPTS):
        version = _next_version(config, registry, digests["policy"])
        files[CARD] = model_card(version, results, config.licence)
        trailers = f"Policy-Digest: {digests['policy']}\nPipeline-Commit: {pipeline_commit}"
        version = registry.commit(version, files, stored, f"Register {version['tag']}\n\n{trailers}")
        alias, alias_message = candidate(registry, config.name, version["tag"], _reason(results["verdict"]))
        tag_message = f"Register {version['tag']}\n\nBundle-Digest: {version['bundle_digest']}\n"
        tags = {version["tag"]: tag_message, alias: alias_message}
        try:
            if registry.publish(tags):
                return Registered(version, is_new=True)
        except RefusedError as refused:
            is_tag_pushed = registry.propose(_branch(version), list(tags))
            if is_tag_pushed is None:
                raise
            pull_request = _pull_request(version, str(refused), tags, is_tag_pushed)
            return Registered(version, is_new=True, pull_request=pull_request, has_tag=is_tag_pushed)
        say("register", f"{config.registry} has changed in the meantime; preparing {version['tag']} again on top of it")
        registry.catch_up()
        if known := registry.find(config.name, digests["policy"]):
            return Registered(known, is_new=False)
    raise RetryableError(f"{config.registry}: changed before each of {_ATTEMPTS} pushes; run the register stage again")


def _entries(registry: Registry, catalogue: Catalogue | None, registered: Registered) -> list[Entry]:
    """Serve versions and return their entries to announce: those that earlier runs did not announce, then this one."""
    if catalogue is None or not registered.has_tag:  # without the tag it is only proposed
        return []
    version = registered.version
    earlier = [each for each in unannounced(registry, version["name"], catalogue) if each.tag != version["tag"]]
    entries = []
    for each, registration in zip(earlier, registry.registrations(earlier), strict=True):
        try:
            entry = entry_of(registry, registration, registry.serve(registration))
            entries.append(replace(entry, source={}))  # the id of the run that registered it is unknown
        except RetryableError:
            raise
        except (PipelineError, KeyError) as error:  # it has an older format, or has lost its weights
            say("register", f"warning: {each.tag} is still not announced: {error}")
    return [*entries, entry_of(registry, version, registry.serve(version))]


def _announce(catalogue: Catalogue, entries: Sequence[Entry]) -> None:
    for entry in entries:
        done = "announced" if catalogue.announce(entry) else "is already known"
        say("register", f"{entry.name}@{entry.version} {done} to {catalogue.address}")


def _branch(version: Mapping[str, Any]) -> str:
    """Return the branch on which a version is proposed."""
    return f"register/{version['tag']}"


def _pull_request(version: Mapping[str, Any], refusal: str, tags: Mapping[str, str], has_tag: bool) -> str:
    """Return title and text of the pull request for a version; `tags` has the messages of its tags by name."""
    text = f"Register {version['tag']}\n\nThe registry did not accept a push to its branch: {refusal}.\n"
    if has_tag:
        return f"{text}\nThe version is registered already: its tag is there. This brings the branch up to date.\n"
    commands = "\n".join(
        f"git tag --annotate --cleanup=verbatim --message={shlex.quote(message)} {shlex.quote(tag)} "
        f"origin/{_branch(version)}"
        for tag, message in tags.items()
    )
    names = " ".join(map(shlex.quote, tags))
    return (
        f"{text}\nThe version is registered by its tags, which the registry did not accept either. Whoever may push "
        f"them runs, after the merge:\n\n```bash\ngit fetch origin\n{commands}\ngit push origin {names}\n```\n"
    )


def _next_version(config: RegisterConfig, snapshot: Snapshot, policy_digest: str) -> dict[str, Any]:
    """Return the version.json of a model's next version, without the digest of its bundle."""
    versions = snapshot.versions(config.name, withdrawn=True)  # numbers of deprecated versions stay taken
    major, minor, patch = versions[-1].number if versions else (0, 0, 0)
    number = f"v{major}.{minor}.{patch + 1}"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    run = os.environ.get(RUN_NAME_VARIABLE) or os.environ.get(RUN_ID_VARIABLE) or None
    return {
        "format": FORMAT,
        "name": config.name,
        "version": number,
        "tag": f"{config.name}@{number}",
        "parent": versions[-1].tag if versions else None,
        "policy_digest": policy_digest,
        "registry": config.registry,
        "model_registry": config.model_registry,
        "path": POLICY,
        "registered": {"at": now, "by": person(), "run": run},
    }


def _ensure_candidate(registry: Registry, version: Mapping[str, Any], verdict: Mapping[str, Any]) -> None:
    """Make a version the candidate if it has never been: its registration may have been killed before that."""
    commit = registry.version(version["tag"]).commit
    if all(each.commit != commit for each in registry.assignments(version["name"], CANDIDATE)):
        tag, message = candidate(registry, version["name"], version["tag"], _reason(verdict))
        registry.publish({tag: message}, commit)


def _reason(verdict: Mapping[str, Any]) -> str:
    """Return why a version was registered, for the message of its tag."""
    missed = "; ".join(verdict["reasons"])
    return f"missed the gate, which is not enforced: {missed}" if missed else "passed the gate"
