"""The register stage: a policy that passed the gate becomes a version that can be fetched, with its full provenance.

Registering the same weights twice gives the same version; a run killed at any point is completed by the next one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from components.register.aliases import candidate
from components.register.catalogue import Catalogue, entry_of, weights_url
from components.register.config import RegisterConfig
from components.register.evidence import check_evidence
from components.register.registry import POLICY, VERSION_FILE, Registry, open_registry
from components.shared import jsonl, lineage
from components.shared.errors import GateMissedError, RetryableError
from components.shared.execution import Revision
from components.shared.progress import say
from components.shared.stage import Stage

_CARD = "model_card.md"
_ATTEMPTS = 10
"""Pushes to a registry that others change at the same time."""
_REPORT_FILES = ("verdict", "summary", "provenance")


def register(config: RegisterConfig, *, policy: Path, report: Path, registration: Path) -> dict[str, float]:
    """Enforce the gate's verdict and register the policy as a new version unless its weights already are one."""
    policy_digest = lineage.digest(policy)
    made = {name: jsonl.read_json(report / f"{name}.json") for name in _REPORT_FILES}
    check_evidence(report, made, policy, policy_digest)
    verdict = made["verdict"]
    if not verdict["passed"]:
        reasons = "; ".join(verdict["reasons"])
        if verdict["enforced"]:
            raise GateMissedError(f"the policy missed the gate and was not registered: {reasons}")
        say("register", f"the policy missed the gate, which is not enforced: {reasons}")
    if not made["summary"].get("learned", True):
        say("register", "warning: GRPO learned nothing: the policy has the weights of its reference")
    # Connected before anything is registered: a wrong address is an error while there is nothing to undo.
    catalogue = Catalogue(config.model_registry) if config.model_registry else None
    with open_registry(config.registry, config.storage) as registry:
        if catalogue:
            weights_url(registry)
        version = registry.snapshot.find(config.name, policy_digest)
        is_new = False
        if version is None:
            files: dict[str, str | Path] = {f"{name}.json": report / f"{name}.json" for name in _REPORT_FILES}
            files["report.html"] = report / "report.html"
            if (policy / lineage.FILE_NAME).is_file():
                files[lineage.FILE_NAME] = policy / lineage.FILE_NAME
            version, is_new = _register(config, registry, policy, policy_digest, files, made)
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
    inputs=("policy", "report"),
    outputs=("registration",),
)


def _register(
    config: RegisterConfig,
    registry: Registry,
    policy: Path,
    policy_digest: str,
    files: Mapping[str, str | Path],
    made: Mapping[str, Any],
) -> tuple[dict[str, Any], bool]:
    """Return the version with these weights, and whether it is new; others may register at the same time."""
    pointer = registry.store(policy)
    made_by = lineage.read(policy)
    revision = (made_by and made_by.revision()) or Revision()
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
        own = {
            f"{POLICY}.dvc": pointer,
            _CARD: _model_card(version, **made),
            VERSION_FILE: json.dumps(version, indent=2) + "\n",
        }
        message = f"Register {version['tag']}\n\nPolicy-Digest: {policy_digest}\nPipeline-Commit: {revision}"
        registry.commit(config.name, {**files, **own}, message)
        if attempt == 0:
            registry.verify(version)
        reason = "; ".join(made["verdict"]["reasons"]) or "passed the gate"
        alias = candidate(registry.snapshot, config.name, version["tag"], reason)
        if registry.publish(config.name, number, *alias):
            return version, True
        say("register", f"{config.registry} has changed in the meantime; preparing {version['tag']} again on top of it")
        registry.catch_up()
        known = registry.snapshot.find(config.name, policy_digest)
        if known:
            return known, False
    raise RetryableError(f"{config.registry}: changed before each of {_ATTEMPTS} pushes; run the register stage again")


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
