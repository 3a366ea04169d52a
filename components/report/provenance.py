"""What a run was made of, gathered from the lineage of its artifacts: configs, digests and packages."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from components.shared.errors import PipelineError
from components.shared.lineage import value_digest

_ORDER = ("prepare_data", "validate_data", "train_sft", "train_grpo", "evaluate")


@dataclass(frozen=True)
class Provenance:
    """The stages behind a report, each once."""

    configs: dict[str, dict[str, Any]]
    """Config by stage, in the order of the pipeline."""
    inputs: dict[str, str]
    """Digest of each artifact that went into a stage, by name."""
    code: str | None
    packages: dict[str, str]
    """Version of each package that any of the stages had: they may have run in different images."""

    @property
    def params_digest(self) -> str | None:
        """One digest for all configs; None where no artifact carries its lineage."""
        return value_digest(self.configs) if self.configs else None

    def as_json(self) -> dict[str, Any]:
        """All of it, for the model card."""
        return asdict(self)


def gather(lineages: Mapping[str, dict[str, Any] | None]) -> Provenance:
    """Return the provenance of artifacts by name; two configs of one stage mean that runs were mixed."""
    configs: dict[str, dict[str, Any]] = {}
    inputs: dict[str, str] = {}
    code: str | None = None
    packages: dict[str, set[str]] = {}
    for name, top in lineages.items():
        for lineage in _walk(top):
            stage = lineage["stage"]
            if configs.setdefault(stage, lineage["config"]) != lineage["config"]:
                raise PipelineError(f"input `{name}`: comes from another config of {stage} than the inputs before it")
            for artifact, made in lineage["inputs"].items():
                # Evaluations take their models under one name.
                inputs[f"{name.partition('_')[0]} model" if artifact == "model" else artifact] = made["digest"]
            code = lineage["code"]
            for package, version in lineage["packages"].items():
                packages.setdefault(package, set()).add(version)
    ordered = sorted(configs, key=lambda stage: (_ORDER.index(stage) if stage in _ORDER else len(_ORDER), stage))
    versions = {package: ", ".join(sorted(found)) for package, found in sorted(packages.items())}
    return Provenance({stage: configs[stage] for stage in ordered}, inputs, code, versions)


def _walk(lineage: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if lineage is None:
        return
    for made in lineage["inputs"].values():
        yield from _walk(made["lineage"])
    yield lineage
