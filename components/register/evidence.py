"""The evidence for a version: a report that is consistent and is about the very weights that are to be registered."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.shared import jsonl, lineage
from components.shared.errors import PipelineError

_MODELS = ("base", "sft", "grpo")
_RERUN = "run the report stage again"


def check_evidence(report: Path, policy: Path, policy_digest: str) -> None:
    """Raise PipelineError unless `report` is consistent and about the policy with this digest and its lineage."""
    report_lineage = lineage.read(report) or {}
    models = {name: _evaluated_model(report, report_lineage, name) for name in _MODELS}
    _check_weights(policy, policy_digest, {name: model["digest"] for name, model in models.items()})
    policy_lineage = models["grpo"].get("lineage")
    if policy_lineage != lineage.read(policy):
        raise PipelineError(
            f"{policy / lineage.FILE_NAME}: differs from the lineage of the evaluated policy, although the weights are "
            f"the same ({policy_digest[:12]}); evaluate this policy, or restore its lineage"
        )
    _check_reference(report, models["sft"]["digest"], policy_lineage or {"inputs": {}})
    try:
        _check_files(report, report_lineage["config"]["gate"], models)
    except (KeyError, TypeError) as error:
        raise PipelineError(f"{report}: not as the report stage writes it ({error}); {_RERUN}") from None


def _evaluated_model(report: Path, report_lineage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return digest and lineage of a model whose evaluation is in the report."""
    try:
        evaluation = report_lineage["inputs"][f"{name}_evaluation"]["lineage"]
        model: Mapping[str, Any] = evaluation["inputs"]["model"]
        is_complete = (report_lineage["stage"], evaluation["stage"]) == ("report", "evaluate") and bool(model["digest"])
    except (KeyError, TypeError):
        is_complete = False
    if not is_complete:
        raise PipelineError(
            f"{report / lineage.FILE_NAME}: does not say which weights were evaluated as {name}; {_RERUN}"
        )
    return model


def _check_weights(policy: Path, policy_digest: str, evaluated: Mapping[str, str]) -> None:
    if policy_digest == evaluated["grpo"]:
        return
    name = next((name for name, digest in evaluated.items() if digest == policy_digest), None)
    weights = f"the weights that were evaluated as {name}" if name else "weights that were not evaluated"
    raise PipelineError(
        f"{policy}: has digest {policy_digest[:12]}, {weights}; the report is about the policy with digest "
        f"{evaluated['grpo'][:12]}: register that one, or evaluate this one"
    )


def _check_reference(report: Path, sft_digest: str, policy_lineage: Mapping[str, Any]) -> None:
    """A gain over another model than the one that GRPO started from is not a gain of GRPO."""
    reference = policy_lineage["inputs"].get("reference", {"digest": sft_digest})["digest"]
    if reference != sft_digest:
        raise PipelineError(
            f"{report}: compares the policy with the model {sft_digest[:12]}, but GRPO started from {reference[:12]}; "
            f"evaluate that one as sft, and {_RERUN}"
        )


def _check_files(report: Path, gate: Mapping[str, Any], models: Mapping[str, Any]) -> None:
    """Raise unless the files of the report agree with one another and with the configuration of the gate."""
    verdict, summary, provenance = (
        jsonl.read_json(report / name) for name in ("verdict.json", "summary.json", "provenance.json")
    )
    target, others = verdict["target"], verdict["others"]
    applied = [
        ("enforce", verdict["enforced"]),
        ("target", target["sources"]),
        ("min_gain", target["min_gain"]),
        ("max_p_value", target["max_p_value"]),
        *(("margin", other["margin"]) for other in others),
    ]
    errors = [
        f"verdict.json: applied {key} {value}, but the report was configured with report.gate.{key} {gate[key]}"
        for key, value in applied
        if gate[key] != value
    ]
    if verdict["passed"] != all(part["passed"] for part in (target, *others)):
        errors.append("verdict.json: `passed` contradicts the verdicts on its sources")
    if summary["verdict"] != verdict:
        errors.append("summary.json: has another verdict than verdict.json")
    if any(provenance["inputs"].get(f"{name} model") != model["digest"] for name, model in models.items()):
        errors.append("provenance.json: has other models than lineage.json")
    if errors:
        raise PipelineError(f"{report}/{errors[0]}; {_RERUN}")
