"""What a report says its models were made with."""

from typing import Any

from components.report.findings import collect_provenance


def _made(stage: str, packages: dict[str, str], **inputs: dict[str, Any]) -> dict[str, Any]:
    made = {name: {"digest": name, "lineage": lineage} for name, lineage in inputs.items()}
    return {"stage": stage, "config": {}, "inputs": made, "code": "c", "packages": packages}


def test_packages_are_those_of_all_stages() -> None:
    """Stages run in different images: torch is named although the stage that was looked at last has none."""
    light, heavy = {"numpy": "2.3.5"}, {"numpy": "2.3.5", "torch": "2.13.0"}
    problems = _made("prepare_data", light)
    evaluation = _made("evaluate", heavy, model=_made("train_grpo", heavy, problems=problems), problems=problems)
    found = collect_provenance(
        {"grpo_evaluation": evaluation, "validation": _made("validate_data", light, problems=problems)}
    )
    assert found.packages == {"numpy": "2.3.5", "torch": "2.13.0"}


def test_versions_that_differ_between_stages_are_all_named() -> None:
    """Nobody is told that one version did it all."""
    lineage = _made("evaluate", {"torch": "2.13.0"}, model=_made("train_sft", {"torch": "2.12.1"}))
    assert collect_provenance({"sft_evaluation": lineage}).packages == {"torch": "2.12.1, 2.13.0"}
