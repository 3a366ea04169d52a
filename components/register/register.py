"""The register stage: what passed the gate becomes a version that can be fetched again, with all that it was made from.

Registering the same weights twice gives the same version; a run killed at any point is finished by the next one.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.register.card import render_card
from components.register.catalogue_access import access_to
from components.register.catalogue_entry import entry_of, weights_root
from components.register.config import RegisterConfig
from components.register.evaluated import refuse_unevaluated
from components.register.fetch import check, download
from components.register.model_registry import Catalogue
from components.register.registry import POLICY, VERSION_FILE, Registry, open_registry
from components.shared import jsonl, lineage
from components.shared.errors import GateMissedError, RetryableError
from components.shared.progress import say
from components.shared.step import In, Out
from components.shared.workspace import Workspace

_CARD = "model_card.md"
_REVISION_VARIABLE = "GRPO_PIPELINE_REVISION"
"""Set in the images: the git revision of their code."""
_ATTEMPTS = 10
"""Pushes to a registry that others change meanwhile."""
_REPORT_FILES = ("report.html", "verdict.json", "summary.json", "provenance.json")


def register(config: RegisterConfig, *, policy: In, report: In, registration: Out) -> dict[str, float]:
    """Enforce the gate's verdict and register the policy as a new version, or find it registered already."""
    policy_digest = lineage.digest(policy)
    refuse_unevaluated(report, policy, policy_digest)
    verdict = jsonl.read_json(report / "verdict.json")
    _enforce(verdict)
    if not jsonl.read_json(report / "summary.json").get("learned", True):
        say("register", "warning: GRPO learned nothing: the policy has the weights of its reference")
    # Reached before anything is registered: a wrong address is found while there is nothing to take back.
    catalogue = Catalogue(access_to(config.model_registry)) if config.model_registry else None
    with open_registry(config.registry, config.storage) as registry:
        if catalogue:
            weights_root(registry)
        known = registry.find(config.name, policy_digest)
        version, is_new = (known, False) if known else _register(config, registry, policy, policy_digest, report)
        card = registry.read(version["tag"], _CARD)
        entry = entry_of(registry, version) if catalogue else None
    say("register", f"{version['tag']} {'registered' if is_new else 'was already registered'} in {config.registry}")
    if catalogue and entry:
        told = "made known" if catalogue.announce(entry) else "was known already"
        say("register", f"{version['tag']} {told} to {config.model_registry}")
    jsonl.write_json(registration / VERSION_FILE, version)
    (registration / _CARD).write_text(card, encoding="utf-8")
    return {"registered": float(is_new), "gate_passed": float(verdict["passed"])}


def _enforce(verdict: Mapping[str, Any]) -> None:
    if verdict["passed"]:
        return
    reasons = "; ".join(verdict["reasons"])
    if verdict["enforced"]:
        raise GateMissedError(f"the gate is missed, nothing was registered: {reasons}")
    say("register", f"the gate is missed but not enforced: {reasons}")


def _register(
    config: RegisterConfig, registry: Registry, policy: Path, policy_digest: str, report: Path
) -> tuple[dict[str, Any], bool]:
    """Return the version with these weights, and whether it is new; others may register at the same time."""
    pointer = registry.store(policy)
    for attempt in range(_ATTEMPTS):
        number = registry.next_version(config.name)
        version = {
            "name": config.name,
            "version": number,
            "tag": f"{config.name}@{number}",
            "policy_digest": policy_digest,
            "registry": config.registry,
            "path": POLICY,
        }
        files = {f"{POLICY}.dvc": pointer, **_files(version, policy, report)}
        registry.commit(config.name, files, _message(version))
        if attempt == 0:
            _prove(registry, version)
        if registry.publish(config.name, number):
            return version, True
        say("register", f"{config.registry} was changed by others; {version['tag']} is made again on top of that")
        registry.catch_up()
        known = registry.find(config.name, policy_digest)
        if known:
            return known, False
    raise RetryableError(f"{config.registry}: was changed by others {_ATTEMPTS} times before a push; register again")


def _files(version: Mapping[str, Any], policy: Path, report: Path) -> dict[str, str | Path]:
    """What stands beside the pointer to the weights: everything but the weights."""
    verdict, summary, provenance = (
        jsonl.read_json(report / name) for name in ("verdict.json", "summary.json", "provenance.json")
    )
    files: dict[str, str | Path] = {name: report / name for name in _REPORT_FILES}
    if (policy / lineage.FILE_NAME).is_file():
        files[lineage.FILE_NAME] = policy / lineage.FILE_NAME
    return {
        **files,
        _CARD: render_card(version, verdict, summary, provenance),
        VERSION_FILE: json.dumps(version, indent=2) + "\n",
    }


def _message(version: Mapping[str, Any]) -> str:
    return "\n".join(
        (
            f"Register {version['tag']}",
            "",
            f"Policy-Digest: {version['policy_digest']}",
            f"Pipeline-Commit: {project_commit() or 'unknown, not run from a git repository'}",
        )
    )


def project_commit(project: Path = Path(__file__).parents[2]) -> str | None:
    """Return the git commit that the pipeline's code is from, marked where files differ from it; None if unknown.

    Outside a repository, as in an image, it is the one that the code was taken from.
    """
    if not (project / ".git").exists():
        return os.environ.get(_REVISION_VARIABLE)
    workspace = Workspace(project, project)
    commit = workspace.try_git("rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changed = workspace.try_git("status", "--porcelain", "--", "components", "pipelines")
    return commit.strip() + (" with uncommitted changes" if changed else "")


def _prove(registry: Registry, version: Mapping[str, Any]) -> None:
    """Fetch the weights as any user will, before anyone is told that they are there."""
    clone = registry.clone
    proof = clone.scratch / "proof"
    download(clone, str(clone.folder), clone.git("rev-parse", "HEAD").strip(), proof, version["tag"])
    check(proof, version["policy_digest"], version["tag"])
