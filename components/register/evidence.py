"""The evidence for a version: a report that is consistent and is about the very weights that are to be registered."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.shared import lineage
from components.shared.errors import PipelineError

_MODELS = {"base": "base_model", "sft": "reference", "grpo": "policy"}
"""Inputs of the evaluation by what they are evaluated as."""
_RERUN = "run the report stage again"


def check_evidence(report: Path, files: Mapping[str, Any], policy: Path, policy_digest: str) -> None:
    """Raise PipelineError unless a report, with these JSON files, is consistent and about this policy."""
    try:
        made_by = lineage.read(report) or {}
        evaluation = made_by["inputs"]["evaluation"]["lineage"]
        models = {name: evaluation["inputs"][artifact] for name, artifact in _MODELS.items()}
        digests = {name: model["digest"] for name, model in models.items()}
        stages = (made_by["stage"], evaluation["stage"])
        _check_policy(report, digests, models["grpo"]["lineage"], policy, policy_digest)
        inconsistent = next(_inconsistencies(files, made_by["config"]["gate"], digests), None)
    except (KeyError, TypeError) as error:
        raise PipelineError(f"{report}: not as the report stage writes it ({error}); {_RERUN}") from None
    if stages != ("report", "evaluate"):
        inconsistent = "lineage.json: not of a report on an evaluation"
    if inconsistent:
        raise PipelineError(f"{report}/{inconsistent}; {_RERUN}")


def _check_policy(
    report: Path, digests: Mapping[str, str], evaluated_lineage: Any, policy: Path, policy_digest: str
) -> None:
    """Raise unless these weights were evaluated as GRPO's, against the very model that GRPO started from."""
    if policy_digest != digests["grpo"]:
        name = next((name for name, digest in digests.items() if digest == policy_digest), None)
        weights = f"the weights that were evaluated as {name}" if name else "weights that were not evaluated"
        raise PipelineError(
            f"{policy}: has digest {policy_digest[:12]}, {weights}; the report is about the policy with digest "
            f"{digests['grpo'][:12]}: register that one, or evaluate this one"
        )
    if evaluated_lineage != lineage.read(policy):
        raise PipelineError(
            f"{policy / lineage.FILE_NAME}: differs from the lineage of the evaluated policy, although the weights are "
            f"the same ({policy_digest[:12]}); evaluate this policy, or restore its lineage"
        )
    started_from = (evaluated_lineage or {"inputs": {}})["inputs"].get("reference", {"digest": digests["sft"]})[
        "digest"
    ]
    if started_from != digests["sft"]:
        raise PipelineError(
            f"{report}: compares the policy with the model {digests['sft'][:12]}, but GRPO started from "
            f"{started_from[:12]}; evaluate that one as sft, and {_RERUN}"
        )


def _inconsistencies(files: Mapping[str, Any], gate: Mapping[str, Any], digests: Mapping[str, str]) -> Iterator[str]:
    """Yield where the files of the report contradict one another or the configuration of the gate."""
    verdict, summary, provenance = files["verdict"], files["summary"], files["provenance"]
    for key, value in {**verdict["gate"], "enforce": verdict["enforced"]}.items():
        if gate[key] != value:
            configured = f"the report was configured with report.gate.{key} {gate[key]}"
            yield f"verdict.json: applied {key} {value}, but {configured}"
    conditions = [*verdict["sources"], *verdict["health"]]
    missed = [condition["reason"] for condition in conditions if not condition["passed"]]
    if verdict["passed"] == bool(missed) or verdict["reasons"] != missed:
        yield "verdict.json: `passed` contradicts its conditions"
    if summary["verdict"] != verdict:
        yield "summary.json: has another verdict than verdict.json"
    if any(provenance["inputs"].get(_MODELS[name]) != digest for name, digest in digests.items()):
        yield "provenance.json: has other models than lineage.json"
