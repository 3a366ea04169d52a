"""Only the weights that were evaluated can be registered, and only on a report that is whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.register.config import RegisterConfig
from components.register.register import STAGE as REGISTER
from components.shared import jsonl, lineage
from components.shared.errors import GateMissedError, PipelineError
from components.shared.model import write_reference
from components.shared.stage import run
from tests.report.synthetic import made_by_grpo, write_bare_report


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy as train_grpo leaves it."""
    return make_model(tmp_path / "policy", b"trained")


@pytest.fixture
def report(tmp_path: Path, policy: Path) -> Path:
    """A report on that policy, which passed the gate."""
    write_bare_report(tmp_path / "report", policy)
    return tmp_path / "report"


def make_model(folder: Path, weights: bytes) -> Path:
    """A model with these weights."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer" / "vocabulary.txt").write_text("a b c")
    jsonl.write_json(folder / "pipeline.json", {"prompt": "{question}", "answer": "declared"})
    lineage.write(folder, made_by_grpo())
    return folder


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file in place."""
    content = jsonl.read_json(path)
    change(content)
    jsonl.write_json(path, content)


def set_verdict(report: Path, *, passed: bool, enforced: bool) -> None:
    """Have a report that was made with another outcome, in all its files."""

    def change(verdict: Any) -> None:
        verdict.update(passed=passed, enforced=enforced, reasons=[] if passed else ["too little"])
        verdict["target"]["passed"] = passed

    rewrite(report / "verdict.json", change)
    rewrite(report / "summary.json", lambda summary: change(summary["verdict"]))
    rewrite(report / "lineage.json", lambda made: made["config"]["gate"].update(enforce=enforced))


def refusal(policy: Path, report: Path) -> str:
    """What the stage says when it refuses; nothing is made."""
    folder = report.parent
    before = sorted(folder.rglob("*"))
    config = RegisterConfig(registry=str(folder / "registry"), name="grpo-policy")
    with pytest.raises(PipelineError) as refused:
        run(REGISTER, config, {"policy": policy, "report": report, "registration": folder / "out"})
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert sorted(folder.rglob("*")) == before
    return str(refused.value)


@pytest.mark.parametrize("enforced", [True, False])
@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer/vocabulary.txt", "pipeline.json", "lineage.json"])
def test_a_changed_byte_is_refused_under_any_verdict(
    policy: Path, report: Path, file: str, passed: bool, enforced: bool
) -> None:
    """One bit of any file of the policy: the message names what was evaluated."""
    set_verdict(report, passed=passed, enforced=enforced)
    evaluated, content = lineage.digest(policy), (policy / file).read_bytes()
    index = content.index(b"a")
    (policy / file).write_bytes(content[:index] + b"`" + content[index + 1 :])
    message = refusal(policy, report)
    assert evaluated[:12] in message
    assert lineage.digest(policy)[:12] in message


@pytest.mark.parametrize("enforced", [True, False])
def test_the_sft_model_is_refused_in_place_of_the_policy(policy: Path, report: Path, enforced: bool) -> None:
    """The message names both digests and as what the weights were evaluated."""
    set_verdict(report, passed=True, enforced=enforced)
    sft = make_model(report.parent / "sft", b"fine-tuned")

    def change(made: Any) -> None:
        for of in (made["inputs"]["sft_evaluation"]["lineage"]["inputs"]["model"], reference(made)):
            of["digest"] = lineage.digest(sft)

    rewrite(report / "lineage.json", change)
    message = refusal(sft, report)
    assert f"{lineage.digest(sft)[:12]}, the weights that were evaluated as sft" in message
    assert lineage.digest(policy)[:12] in message


def reference(made: Any) -> Any:
    """The entry of the model that GRPO started from in the lineage of a report."""
    return made["inputs"]["grpo_evaluation"]["lineage"]["inputs"]["model"]["lineage"]["inputs"]["reference"]


@pytest.mark.parametrize("file", ["model.safetensors", "lineage.json"])
def test_a_policy_passed_on_by_reference_is_compared_by_its_content(policy: Path, report: Path, file: str) -> None:
    """The folder that a reference names is what has to be the one that was evaluated."""
    set_verdict(report, passed=False, enforced=True)
    write_reference(report.parent / "reference", policy)
    config = RegisterConfig(registry=str(report.parent / "registry"), name="grpo-policy")
    folders = {"policy": report.parent / "reference", "report": report, "registration": report.parent / "out"}
    with pytest.raises(GateMissedError):  # it is the gate that refuses the policy that was evaluated
        run(REGISTER, config, folders)
    (policy / file).write_bytes((policy / file).read_bytes().replace(b"a", b"`", 1))
    write_reference(report.parent / "reference", policy)
    assert "evaluated" in refusal(report.parent / "reference", report)


def test_a_policy_compared_with_another_model_than_it_was_trained_from_is_refused(policy: Path, report: Path) -> None:
    """A gain over some other model is not what the gate asks for."""
    model = ("inputs", "sft_evaluation", "lineage", "inputs", "model")

    def change(made: Any) -> None:
        for key in model:
            made = made[key]
        made["digest"] = "f" * 64

    rewrite(report / "lineage.json", change)
    message = refusal(policy, report)
    assert "compares the policy with the model ffffffffffff, but GRPO started from " in message


def _without(name: str) -> Callable[[Any], object]:
    return lambda made: made["inputs"].pop(name)


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        ("lineage.json", lambda made: made.update(stage="evaluate"), "lineage.json: does not say which weights"),
        ("lineage.json", _without("grpo_evaluation"), "does not say which weights were evaluated as grpo"),
        ("lineage.json", _without("sft_evaluation"), "does not say which weights were evaluated as sft"),
        (
            "verdict.json",
            lambda verdict: verdict.update(enforced=False),
            "applied enforce False, but the report",
        ),
        ("verdict.json", lambda verdict: verdict["target"].update(max_p_value=0.9), "applied max_p_value 0.9"),
        ("verdict.json", lambda verdict: verdict["target"].update(passed=False), "`passed` contradicts"),
        (
            "summary.json",
            lambda summary: summary["verdict"].update(passed=False),
            "summary.json: has another verdict",
        ),
        ("verdict.json", lambda verdict: verdict.pop("target"), "not as the report stage writes it ('target')"),
        ("provenance.json", lambda made: made["inputs"].update({"grpo model": "0"}), "has other models than lineage"),
    ],
)
def test_a_report_whose_parts_disagree_is_refused(
    policy: Path, report: Path, file: str, change: Callable[[Any], object], expected: str
) -> None:
    """Lineage, verdict, summary and provenance have to be of one run of the report stage; the file is named."""
    rewrite(report / file, change)
    message = refusal(policy, report)
    assert expected in message
    assert message.endswith("run the report stage again")


def test_a_report_without_lineage_is_refused(policy: Path, report: Path) -> None:
    """Nothing says what it judges."""
    (report / "lineage.json").unlink()
    assert "does not say which weights were evaluated as base" in refusal(policy, report)
