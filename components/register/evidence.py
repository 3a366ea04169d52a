"""The evidence for a version: a report that is consistent and is about the very weights that are to be registered."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.shared import lineage
from components.shared.errors import PipelineError
from components.shared.lineage import Input, Lineage

_MODELS = {"base": "base_model", "sft": "reference", "grpo": "policy"}
"""Inputs of the evaluation by what they are evaluated as."""
_RERUN = "run the report stage again"


def check_evidence(report: Path, files: Mapping[str, Any], policy: Path, policy_digest: str) -> None:
    """Raise PipelineError unless a report, with these JSON files, is consistent and about this policy."""
    try:
        made_by = lineage.read(report)
        if made_by is None:
            raise PipelineError(f"{report}: has no {lineage.FILE_NAME}; {_RERUN}")
        evaluation = made_by.maker(made_by.work.inputs["evaluation"])
        if (made_by.work.stage, evaluation and evaluation.stage) != ("report", "evaluate"):
            raise PipelineError(f"{report}/lineage.json: not of a report on an evaluation; {_RERUN}")
        assert evaluation is not None
        models = {name: evaluation.inputs[artifact] for name, artifact in _MODELS.items()}
        _check_policy(report, made_by, models, policy, policy_digest)
        digests = {name: model.digest for name, model in models.items()}
        inconsistent = next(_inconsistencies(files, made_by.work.config["gate"], digests), None)
    except (KeyError, TypeError) as error:
        raise PipelineError(f"{report}: not as the report stage writes it ({error}); {_RERUN}") from None
    if inconsistent:
        raise PipelineError(f"{report}/{inconsistent}; {_RERUN}")


def _check_policy(
    report: Path, made_by: Lineage, models: Mapping[str, Input], policy: Path, policy_digest: str
) -> None:
    """Raise unless these weights were evaluated as GRPO's, against the very model that GRPO started from."""
    evaluated, sft = models["grpo"], models["sft"]
    if policy_digest != evaluated.digest:
        name = next((name for name, model in models.items() if model.digest == policy_digest), None)
        weights = f"the weights that were evaluated as {name}" if name else "weights that were not evaluated"
        raise PipelineError(
            f"{policy}: has digest {policy_digest[:12]}, {weights}; the report is about the policy with digest "
            f"{evaluated.digest[:12]}: register that one, or evaluate this one"
        )
    own = lineage.read(policy)
    if (own and own.made_by) != evaluated.made_by or (own and not made_by.contains(own)):
        raise PipelineError(
            f"{policy / lineage.FILE_NAME}: differs from the lineage of the evaluated policy, although the weights are "
            f"the same ({policy_digest[:12]}); evaluate this policy, or restore its lineage"
        )
    training = made_by.maker(evaluated)
    started_from = training.inputs.get("reference", sft) if training else sft
    if started_from.digest != sft.digest:
        raise PipelineError(
            f"{report}: compares the policy with the model {sft.digest[:12]}, but GRPO started from "
            f"{started_from.digest[:12]}; evaluate that one as sft, and {_RERUN}"
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
