"""Only the evaluated weights can be registered, only on a consistent report, and only if the gate allows it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.register.consistency import require_stored
from components.register.register import STAGE
from components.shared import jsonl, lineage, stage
from components.shared.errors import PipelineError
from tests.lineages import made
from tests.register.registrations import inputs_of, make_config, make_policy
from tests.report.synthetic import ARTIFACTS, report_lineage


@pytest.fixture
def inputs(tmp_path: Path, passed: Path) -> dict[str, Path]:
    """A policy as train_grpo writes it, what it was made from, and a report on it, which passed the gate."""
    return inputs_of(passed, make_policy(tmp_path / "policy"))


def _rewrite(path: Path, change: Callable[[Any], object]) -> None:
    content = jsonl.read_json(path)
    change(content)
    jsonl.write_json(path, content)


def refusal(inputs: dict[str, Path]) -> str:
    """Return the error of the stage, which writes nothing."""
    folder = inputs["report"].parent
    before = sorted(folder.rglob("*"))
    with pytest.raises(PipelineError) as refused:
        stage.run(STAGE, make_config(folder), {**inputs, "registration": folder / "out"})
    assert type(refused.value) is PipelineError
    assert "\n" not in str(refused.value)
    assert sorted(folder.rglob("*")) == before
    return str(refused.value)


@pytest.mark.parametrize("name", ["policy", *ARTIFACTS])
@pytest.mark.parametrize("what", ["content", "lineage"])
def test_what_the_report_is_not_about_is_refused(inputs: dict[str, Path], name: str, what: str) -> None:
    """Policy, models, problems, answers and curves have to be those that were reported on, and so their lineages."""
    folder = inputs[name]
    reported = lineage.digest(folder)
    if what == "lineage":
        lineage.write(folder, made("train_sft", {"epochs": 9}))
    else:
        path = next(path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != lineage.FILE_NAME)
        path.write_bytes(path.read_bytes() + b" ")
    message = refusal(inputs)
    assert message.startswith(str(folder))
    assert reported[:12] in message
    assert lineage.digest(folder)[:12] in message


def test_policy_compared_with_another_model_than_its_reference_is_refused(inputs: dict[str, Path]) -> None:
    """A gain over some other model is not what the gate asks for."""
    lineage.write(inputs["report"], report_lineage(inputs["policy"], {}, reference="f" * 64))
    assert "with the model ffffffffffff, but GRPO started from " in refusal(inputs)


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
    inputs: dict[str, Path], file: str, change: Callable[[Any], object], expected: str
) -> None:
    """Lineage, verdict, summary and provenance have to be of one run of the report stage; the file is named."""
    _rewrite(inputs["report"] / file, change)
    message = refusal(inputs)
    assert expected in message
    assert message.endswith("run the report stage again")


@pytest.mark.parametrize("forged", [{"passed": True}, {"passed": True, "reasons": []}, {"reasons": ["too few"]}])
def test_a_missed_verdict_cannot_be_made_a_passed_one(unenforced: Path, tmp_path: Path, forged: dict[str, Any]) -> None:
    """The conditions in the report contradict a changed `passed` or `reasons`, even where both files agree."""
    inputs = inputs_of(unenforced, make_policy(tmp_path / "policy"))
    _rewrite(inputs["report"] / "verdict.json", lambda verdict: verdict.update(forged))
    _rewrite(inputs["report"] / "summary.json", lambda summary: summary["verdict"].update(forged))
    assert "verdict.json: `passed` contradicts its conditions" in refusal(inputs)


def test_what_changed_while_it_was_stored_is_refused() -> None:
    """The stored files of an artifact give the digest that was registered, and those of others do not matter."""
    stored = {"policy/a": "0" * 64, "policy/b/c": "1" * 64, "report/a": "2" * 64}
    digest = lineage.folder_digest({"a": "0" * 64, "b/c": "1" * 64})
    require_stored("policy", "policy", stored, digest)
    for changed in ({"policy/a": "3" * 64}, {"policy/d": "0" * 64}):
        with pytest.raises(PipelineError, match="the input `policy` has changed while it was stored"):
            require_stored("policy", "policy", {**stored, **changed}, digest)


def test_report_on_something_else_than_an_evaluation_is_refused(inputs: dict[str, Path]) -> None:
    """Its lineage leads from the report over the evaluation to the models."""
    for made_by, expected in (
        (made("evaluate"), "not as the report stage writes it ('evaluation')"),
        (made("report", {}, {"evaluation": made("train_sft")}), "lineage.json: not of a report on an evaluation"),
        (made("report", {}, {"evaluation": made("evaluate")}), "not as the report stage writes it ('policy')"),
    ):
        lineage.write(inputs["report"], made_by)
        assert expected in refusal(inputs)
