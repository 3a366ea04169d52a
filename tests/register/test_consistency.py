"""Only the evaluated weights can be registered, only on a consistent report, and only if the gate allows it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.register.config import RegisterConfig
from components.register.consistency import require_stored
from components.register.register import STAGE
from components.shared import jsonl, lineage, stage
from components.shared.errors import PipelineError
from tests.lineages import made
from tests.register.registrations import make_policy
from tests.report.synthetic import ARTIFACTS, bare_lineage, write_artifacts, write_bare_report


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy as train_grpo writes it, with what it was made from beside it."""
    policy = make_policy(tmp_path / "policy")
    write_artifacts(policy)
    return policy


@pytest.fixture
def report(tmp_path: Path, policy: Path) -> Path:
    """A report on that policy, which passed the gate."""
    write_bare_report(tmp_path / "report", policy)
    return tmp_path / "report"


def _rewrite(path: Path, change: Callable[[Any], object]) -> None:
    content = jsonl.read_json(path)
    change(content)
    jsonl.write_json(path, content)


def refusal(policy: Path, report: Path) -> str:
    """Return the error of the stage, which writes nothing."""
    folder = report.parent
    before = sorted(folder.rglob("*"))
    config = RegisterConfig(registry=str(folder / "registry"), name="grpo-policy")
    inputs = {"policy": policy, **_artifacts(policy), "report": report}
    with pytest.raises(PipelineError) as refused:
        stage.run(STAGE, config, {**inputs, "registration": folder / "out"})
    assert type(refused.value) is PipelineError
    assert "\n" not in str(refused.value)
    assert sorted(folder.rglob("*")) == before
    return str(refused.value)


def _artifacts(policy: Path) -> dict[str, Path]:
    return {name: policy.with_name(f"{policy.name}-{name}") for name in ARTIFACTS}


@pytest.mark.parametrize("name", ["policy", *ARTIFACTS])
@pytest.mark.parametrize("what", ["content", "lineage"])
def test_what_the_report_is_not_about_is_refused(policy: Path, report: Path, name: str, what: str) -> None:
    """Policy, models, problems, answers and curves have to be those that were reported on, and so their lineages."""
    folder = {"policy": policy, **_artifacts(policy)}[name]
    reported = lineage.digest(folder)
    if what == "lineage":
        lineage.write(folder, made("train_sft", {"epochs": 9}))
    else:
        path = next(path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != lineage.FILE_NAME)
        path.write_bytes(path.read_bytes() + b" ")
    message = refusal(policy, report)
    assert message.startswith(str(folder))
    assert reported[:12] in message
    assert lineage.digest(folder)[:12] in message


def test_policy_compared_with_another_model_than_its_reference_is_refused(policy: Path, report: Path) -> None:
    """A gain over some other model is not what the gate asks for."""
    lineage.write(report, bare_lineage(policy, reference="f" * 64))
    assert "with the model ffffffffffff, but GRPO started from " in refusal(policy, report)


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        ("verdict.json", lambda verdict: verdict.update(enforced=False), "applied enforce False, but the report"),
        ("verdict.json", lambda verdict: verdict["gate"].update(max_p_value=0.4), "applied max_p_value 0.4"),
        ("verdict.json", lambda verdict: verdict["sources"][0].update(passed=False), "`passed` contradicts"),
        ("summary.json", lambda summary: summary["verdict"].update(passed=False), "summary.json: has another verdict"),
        ("verdict.json", lambda verdict: verdict.pop("sources"), "not as the report stage writes it ('sources')"),
        ("provenance.json", lambda made: made["inputs"].update({"policy": "0"}), "has other models than lineage"),
    ],
)
def test_inconsistent_report_is_refused(
    policy: Path, report: Path, file: str, change: Callable[[Any], object], expected: str
) -> None:
    """Lineage, verdict, summary and provenance have to be of one run of the report stage; the file is named."""
    _rewrite(report / file, change)
    message = refusal(policy, report)
    assert expected in message
    assert message.endswith("run the report stage again")


@pytest.mark.parametrize("forged", [{"passed": True}, {"passed": True, "reasons": []}, {"reasons": ["too few"]}])
def test_a_missed_verdict_cannot_be_made_a_passed_one(policy: Path, report: Path, forged: dict[str, Any]) -> None:
    """The conditions in the report contradict a changed `passed` or `reasons`, even where both files agree."""
    missed = {"passed": False, "enforced": False, "reasons": ["too little"], **forged}

    def change(verdict: Any) -> None:
        verdict.update(missed)
        verdict["gate"]["enforce"] = False
        verdict["sources"][0].update(passed=False, reason="too little")

    _rewrite(report / "verdict.json", change)
    _rewrite(report / "summary.json", lambda summary: change(summary["verdict"]))
    lineage.write(report, bare_lineage(policy, enforce=False))
    assert "verdict.json: `passed` contradicts its conditions" in refusal(policy, report)


def test_what_changed_while_it_was_stored_is_refused() -> None:
    """The stored files of an artifact give the digest that was registered, and those of others do not matter."""
    stored = {"policy/a": "0" * 64, "policy/b/c": "1" * 64, "report/a": "2" * 64}
    digest = lineage.folder_digest({"a": "0" * 64, "b/c": "1" * 64})
    require_stored("policy", "policy", stored, digest)
    for changed in ({"policy/a": "3" * 64}, {"policy/d": "0" * 64}):
        with pytest.raises(PipelineError, match="the input `policy` has changed while it was stored"):
            require_stored("policy", "policy", {**stored, **changed}, digest)


def test_report_on_something_else_than_an_evaluation_is_refused(policy: Path, report: Path) -> None:
    """Its lineage leads from the report over the evaluation to the models."""
    for made_by, expected in (
        (made("evaluate"), "not as the report stage writes it ('evaluation')"),
        (made("report", {}, {"evaluation": made("train_sft")}), "lineage.json: not of a report on an evaluation"),
        (made("report", {}, {"evaluation": made("evaluate")}), "not as the report stage writes it ('policy')"),
    ):
        lineage.write(report, made_by)
        assert expected in refusal(policy, report)
