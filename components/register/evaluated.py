"""Whether a report judges the very weights that are to be registered, as the lineage inside it says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.shared import jsonl, lineage
from components.shared.errors import PipelineError

_MODELS = ("base", "sft", "grpo")
_AGAIN = "run the report stage again"


def refuse_unevaluated(report: Path, policy: Path, policy_digest: str) -> None:
    """Raise PipelineError unless `report` is whole and judges the weights with this digest and their lineage."""
    made_by = lineage.read(report) or {}
    models = {name: _evaluated_model(report, made_by, name) for name in _MODELS}
    _refuse_other_weights(policy, policy_digest, {name: model["digest"] for name, model in models.items()})
    if models["grpo"].get("lineage") != lineage.read(policy):
        raise PipelineError(
            f"{policy / lineage.FILE_NAME}: is not the lineage of the policy that was evaluated, although the weights "
            f"are the same ({policy_digest[:12]}); evaluate this policy, or put its own lineage back"
        )
    _refuse_other_reference(report, models)
    try:
        _refuse_altered(report, made_by["config"]["gate"], models)
    except (KeyError, TypeError) as error:
        raise PipelineError(f"{report}: is not as the report stage writes it ({error}); {_AGAIN}") from None


def _evaluated_model(report: Path, made_by: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Digest and lineage of a model whose evaluation the report was made from."""
    try:
        evaluation = made_by["inputs"][f"{name}_evaluation"]["lineage"]
        model: Mapping[str, Any] = evaluation["inputs"]["model"]
        is_whole = (made_by["stage"], evaluation["stage"]) == ("report", "evaluate") and bool(model["digest"])
    except (KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise PipelineError(
            f"{report / lineage.FILE_NAME}: does not say which weights were evaluated as {name}; {_AGAIN}"
        )
    return model


def _refuse_other_weights(policy: Path, policy_digest: str, evaluated: Mapping[str, str]) -> None:
    if policy_digest == evaluated["grpo"]:
        return
    name = next((name for name, digest in evaluated.items() if digest == policy_digest), None)
    what = f"the weights that were evaluated as {name}" if name else "weights that were not evaluated"
    raise PipelineError(
        f"{policy}: has digest {policy_digest[:12]}, {what}; the report judges the policy with digest "
        f"{evaluated['grpo'][:12]}: register that one, or evaluate this one"
    )


def _refuse_other_reference(report: Path, models: Mapping[str, Any]) -> None:
    """A gain over another model than the one that GRPO started from is no gain of GRPO."""
    trained = models["grpo"].get("lineage") or {"inputs": {}}
    reference = trained["inputs"].get("reference", {"digest": models["sft"]["digest"]})["digest"]
    if reference != models["sft"]["digest"]:
        raise PipelineError(
            f"{report}: compares the policy with a model of digest {models['sft']['digest'][:12]}, but it was trained "
            f"from {reference[:12]}; evaluate that one as sft, and {_AGAIN}"
        )


def _refuse_altered(report: Path, gate: Mapping[str, Any], models: Mapping[str, Any]) -> None:
    """Raise unless the files of the report agree with one another and with the config it was made under."""
    verdict, summary, provenance = (
        jsonl.read_json(report / name) for name in ("verdict.json", "summary.json", "provenance.json")
    )
    target, others = verdict["target"], verdict["others"]
    decided = [
        ("enforce", verdict["enforced"]),
        ("target", target["sources"]),
        ("min_gain", target["min_gain"]),
        ("max_p_value", target["max_p_value"]),
        *(("margin", other["margin"]) for other in others),
    ]
    faults = [
        f"verdict.json: was decided with {key} {value}, and the report was made under report.gate.{key} {gate[key]}"
        for key, value in decided
        if gate[key] != value
    ]
    if verdict["passed"] != all(part["passed"] for part in (target, *others)):
        faults.append("verdict.json: `passed` is not what its parts say")
    if summary["verdict"] != verdict:
        faults.append("summary.json: repeats another verdict than verdict.json")
    if any(provenance["inputs"].get(f"{name} model") != model["digest"] for name, model in models.items()):
        faults.append("provenance.json: names other models than lineage.json")
    if faults:
        raise PipelineError(f"{report}/{faults[0]}; {_AGAIN}")
