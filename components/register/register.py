"""The register stage: a policy that passed the gate becomes a version, a closed bundle of all that it was made from.

Registering the same weights twice gives the same version; a run killed at any point is completed by the next one.
"""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from components.register.aliases import CANDIDATE, candidate, person
from components.register.catalogue import Catalogue, entry_of, weights_url
from components.register.config import RegisterConfig
from components.register.evidence import check_evidence, require_stored
from components.register.registry import POLICY, Registry, open_registry
from components.register.snapshot import FORMAT, VERSION_FILE, Snapshot
from components.shared import jsonl, lineage
from components.shared.environment import RUN_ID_VARIABLE, RUN_NAME_VARIABLE
from components.shared.errors import GateMissedError, RetryableError
from components.shared.execution import Revision
from components.shared.progress import say
from components.shared.stage import Stage

_CARD = "model_card.md"
_ATTEMPTS = 10
"""Pushes to a registry that others change at the same time."""
_REPORT_FILES = ("verdict", "summary", "provenance")
_FOLDERS = {
    "policy": POLICY,
    "reference": "reference",
    "base_model": "base_model",
    "problems": "problems",
    "evaluation": "evaluation",
    "grpo_training": "training",
    "sft_training": "sft_training",
}
"""Folders of a version in the storage, by the inputs that they are copies of."""


def register(config: RegisterConfig, *, report: Path, registration: Path, **made: Path) -> dict[str, float]:
    """Enforce the gate's verdict and register the policy as a new version unless its weights already are one."""
    evidence = {name: jsonl.read_json(report / f"{name}.json") for name in _REPORT_FILES}
    digests = check_evidence(report, evidence, made)
    verdict = evidence["verdict"]
    if not verdict["passed"]:
        reasons = "; ".join(verdict["reasons"])
        if verdict["enforced"]:
            raise GateMissedError(f"the policy missed the gate and was not registered: {reasons}")
        say("register", f"the policy missed the gate, which is not enforced: {reasons}")
    if not evidence["summary"].get("learned", True):
        say("register", "warning: GRPO learned nothing: the policy has the weights of its reference")
    # Connected before anything is registered: a wrong address is an error while there is nothing to undo.
    catalogue = Catalogue(config.model_registry) if config.model_registry else None
    with open_registry(config.registry, config.storage) as registry:
        if catalogue:
            weights_url(registry)
        version = registry.snapshot.find(config.name, digests["policy"])
        is_new = False
        if version is None:
            version, is_new = _register(config, registry, report, made, digests, evidence)
        _ensure_candidate(registry, version, evidence["verdict"])
        card = registry.snapshot.read(version["tag"], _CARD)
        entry = entry_of(registry, version) if catalogue else None
    say("register", f"{version['tag']} {'registered' if is_new else 'is already registered'} in {config.registry}")
    if catalogue and entry:
        announced = "announced" if catalogue.announce(entry) else "is already known"
        say("register", f"{version['tag']} {announced} to {config.model_registry}")
    jsonl.write_json(registration / VERSION_FILE, version)
    (registration / _CARD).write_text(card, encoding="utf-8")
    return {"registered": float(is_new), "gate_passed": float(verdict["passed"])}


STAGE = Stage(
    name="register",
    function=register,
    config=RegisterConfig,
    inputs=(*_FOLDERS, "report"),
    outputs=("registration",),
)


def _register(
    config: RegisterConfig,
    registry: Registry,
    report: Path,
    made: Mapping[str, Path],
    digests: Mapping[str, str],
    evidence: Mapping[str, Any],
) -> tuple[dict[str, Any], bool]:
    """Return version.json of the version with these weights, and whether it is new; others may register as well."""
    stored = registry.store({folder: made[name] for name, folder in _FOLDERS.items()})
    for name, folder in _FOLDERS.items():
        require_stored(name, folder, stored.digests, digests[name])
    files: dict[str, str | Path] = {file.name: file for file in sorted(report.iterdir()) if file.is_file()}
    made_by = lineage.read(made["policy"])
    revision = (made_by and made_by.revision()) or Revision()
    for _ in range(_ATTEMPTS):
        version = _next_version(config, registry.snapshot, digests["policy"])
        own = {_CARD: _model_card(version, **evidence)}
        message = f"Register {version['tag']}\n\nPolicy-Digest: {digests['policy']}\nPipeline-Commit: {revision}"
        version = registry.commit(version, {**files, **own}, stored, message)
        alias = candidate(registry.snapshot, config.name, version["tag"], _reason(evidence["verdict"]))
        tag = f"Register {version['tag']}\n\nBundle-Digest: {version['bundle_digest']}\n"
        if registry.publish({version["tag"]: tag, **dict([alias])}):
            return version, True
        say("register", f"{config.registry} has changed in the meantime; preparing {version['tag']} again on top of it")
        registry.catch_up()
        known = registry.snapshot.find(config.name, digests["policy"])
        if known:
            return known, False
    raise RetryableError(f"{config.registry}: changed before each of {_ATTEMPTS} pushes; run the register stage again")


def _next_version(config: RegisterConfig, snapshot: Snapshot, policy_digest: str) -> dict[str, Any]:
    """The version.json of a version that follows all others of its model, without the digest of the bundle."""
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
        "path": POLICY,
        "registered": {"at": now, "by": person(), "run": run},
    }


def _ensure_candidate(registry: Registry, version: Mapping[str, Any], verdict: Mapping[str, Any]) -> None:
    """Make a version the candidate that never was, because its registration was killed between the two tags."""
    commit = registry.snapshot.version(version["tag"]).commit
    if all(each.commit != commit for each in registry.snapshot.assignments(version["name"], CANDIDATE)):
        tag, message = candidate(registry.snapshot, version["name"], version["tag"], _reason(verdict))
        registry.assign(tag, commit, message)


def _reason(verdict: Mapping[str, Any]) -> str:
    return "; ".join(verdict["reasons"]) or "passed the gate"


def _model_card(version: Mapping[str, Any], verdict: Any, summary: Any, provenance: Any) -> str:
    """Return the model card in Markdown; equal inputs give equal text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # Markdown: nothing to escape
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    configs: dict[str, Any] = provenance["configs"]
    models = (config["model"] for config in configs.values() if isinstance(config.get("model"), dict))
    return environment.get_template("model_card.md.jinja").render(
        version=version,
        verdict=verdict,
        summary=summary,
        provenance=provenance,
        configs={
            stage: yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100).rstrip()
            for stage, values in configs.items()
        },
        model={"base": "unknown", "prompt": None, **next(models, {})},
    )
