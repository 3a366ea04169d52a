"""Checks before a registration: is the report consistent, and about exactly the artifacts to be registered?"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.shared import lineage
from components.shared.errors import PipelineError
from components.shared.lineage import Input, Lineage

_MODELS = ("base_model", "reference", "policy")
_RERUN = "run the report stage again"


def check_consistency(report: Path, results: Mapping[str, Any], folders: Mapping[str, Path]) -> dict[str, str]:
    """Return the digest of each artifact; PipelineError unless a consistent report is about all of them.

    `results` are the report's `verdict`, `summary` and `provenance`.
    """
    digests = {name: lineage.digest(folder) for name, folder in folders.items()}
    try:
        made_by = lineage.read(report)
        if made_by is None:
            raise PipelineError(f"{report}: has no {lineage.FILE_NAME}; {_RERUN}")
        reporting = made_by.work
        evaluation = made_by.maker(reporting.inputs["evaluation"])
        if evaluation is None or (reporting.stage, evaluation.stage) != ("report", "evaluate"):
            raise PipelineError(f"{report}/lineage.json: not of a report on an evaluation; {_RERUN}")
        inputs = {**evaluation.inputs, **reporting.inputs}
        training, sft = made_by.maker(inputs["policy"]), inputs["reference"]
        started_from = training.inputs.get("reference", sft) if training else sft
        if started_from.digest != sft.digest:
            raise PipelineError(
                f"{report}: compares the policy with the model {sft.digest[:12]}, but GRPO started from "
                f"{started_from.digest[:12]}; evaluate that one as sft, and {_RERUN}"
            )
        for name, folder in folders.items():
            _check_artifact(report, made_by, name, inputs[name], folder, digests[name])
        inconsistency = next(_inconsistencies(results, reporting.config["gate"], digests), None)
    except (KeyError, TypeError) as error:
        raise PipelineError(f"{report}: not as the report stage writes it ({error}); {_RERUN}") from None
    if inconsistency:
        raise PipelineError(f"{report}/{inconsistency}; {_RERUN}")
    return digests


def require_stored(name: str, folder: str, stored: Mapping[str, str], digest: str) -> None:
    """Raise PipelineError unless the files `stored` in a folder of a version (SHA-256 by path) have this digest."""
    files = {path.removeprefix(f"{folder}/"): each for path, each in stored.items() if path.startswith(f"{folder}/")}
    if lineage.folder_digest(files) != digest:
        raise PipelineError(f"register: the input `{name}` has changed while it was stored; run the stage again")


def _check_artifact(report: Path, made_by: Lineage, name: str, reported: Input, folder: Path, digest: str) -> None:
    """Raise PipelineError unless an artifact has the content and the lineage that the report's lineage says."""
    if digest != reported.digest:
        raise PipelineError(
            f"{folder}: has digest {digest[:12]}, but the report {report} is about the input `{name}` with digest "
            f"{reported.digest[:12]}; register what was reported on, or {_RERUN}"
        )
    own = lineage.read(folder)
    maker = own.made_by if own else None
    if maker != reported.made_by or (own and not made_by.contains(own)):
        raise PipelineError(
            f"{folder / lineage.FILE_NAME}: differs from the lineage in the report {report}, although the content is "
            f"the same ({digest[:12]}); restore it, or evaluate and report on this one"
        )


def _inconsistencies(results: Mapping[str, Any], gate: Mapping[str, Any], digests: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each contradiction between the files of the report, or to the configured gate."""
    verdict, summary, provenance = results["verdict"], results["summary"], results["provenance"]
    for key, value in {**verdict["gate"], "enforce": verdict["enforced"]}.items():
        if gate[key] != value:
            configured = f"the report was configured with report.gate.{key} {gate[key]}"
            yield f"verdict.json: applied {key} {value}, but {configured}"
    champion = verdict["champion"]
    conditions = [*verdict["sources"], *verdict["health"], *([champion] if champion else [])]
    missed = [condition["reason"] for condition in conditions if not condition["passed"]]
    if verdict["passed"] == bool(missed) or verdict["reasons"] != missed:
        yield "verdict.json: `passed` contradicts its conditions"
    if summary["verdict"] != verdict:
        yield "summary.json: has another verdict than verdict.json"
    if any(provenance["inputs"].get(name) != digests[name] for name in _MODELS):
        yield "provenance.json: has other models than lineage.json"
