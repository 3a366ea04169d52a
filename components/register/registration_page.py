"""The page on a registration for Kubeflow: what was registered, where it is, what it cost, and how to fetch it."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from components.register.register import ADDRESSES_FILE
from components.register.snapshot import VERSION_FILE
from components.shared import jsonl, lineage
from components.shared.page import render


def registration_page(config: Mapping[str, Any], registration: Path) -> str:
    """Return the HTML page on a finished registration; `config` is the register section of the params file."""
    version, addresses = (jsonl.read_json(registration / name) for name in (VERSION_FILE, ADDRESSES_FILE))
    made_by = lineage.read(registration)
    assert made_by is not None
    data = made_by.stage("prepare_data")
    materials = sorted(data.materials.items()) if data else []
    revision = made_by.revision("train_grpo") or made_by.revision()
    storage = addresses.get("storage") or config.get("storage")
    facts = {
        "Version": version["tag"],
        "Registry": version["registry"],
        "Weights": storage or f"next to the registry, under {version['path']}",
        "Weights to serve": addresses.get("served"),
        "Model registry": version["model_registry"],
        "Digest of the weights": version["policy_digest"],
        **{f"Data: {name}": _origin(material) for name, material in materials},
        "Code": str(revision) if revision else None,
    }
    stages = {work.stage: made_by.run(work.stage) for work in made_by.works}
    runs = {stage: run for stage, run in stages.items() if run}
    elapsed = max(run.finished for run in runs.values()) - min(run.started for run in runs.values())
    return render(
        Path(__file__).with_name("registration.html.jinja"),
        version=version,
        facts={name: value for name, value in facts.items() if value},
        runs=dict(sorted(runs.items(), key=lambda each: each[1].started)),
        work_s=sum(run.seconds for run in runs.values()),
        total_s=elapsed.total_seconds(),
        duration=lambda seconds: str(timedelta(seconds=round(seconds))),  # such as 0:04:07
    )


def _origin(material: lineage.Material) -> str:
    """Return where a material is from, or its digest."""
    if material.repository and material.commit:
        return f"{material.repository} at {material.commit}"
    return f"SHA-256 {material.sha256}" if material.sha256 else "unknown"
