"""The report stage: compares the models of a run and decides whether the policy may be registered.

A stage of its own because a missed gate must still leave a report: the verdict is decided here, `register` enforces it.
"""

from dataclasses import asdict
from pathlib import Path

from components.report.config import ReportConfig
from components.report.findings import Findings, find
from components.report.page import render_report
from components.shared import jsonl
from components.shared.progress import say
from components.shared.stage import Stage


def report(
    config: ReportConfig,
    *,
    base_evaluation: Path,
    sft_evaluation: Path,
    grpo_evaluation: Path,
    sft_training: Path,
    grpo_training: Path,
    validation: Path,
    report: Path,
) -> dict[str, float]:
    """Compare base, SFT and GRPO on the same problems, decide the promotion gate and write the page."""
    folders: dict[str, Path] = {
        "base_evaluation": base_evaluation,
        "sft_evaluation": sft_evaluation,
        "grpo_evaluation": grpo_evaluation,
        "sft_training": sft_training,
        "grpo_training": grpo_training,
        "validation": validation,
    }
    findings = find(config, folders)
    (report / "report.html").write_text(render_report(config, folders, findings=findings), encoding="utf-8")
    jsonl.write_json(report / "verdict.json", findings.verdict)
    jsonl.write_json(report / "summary.json", findings.summary())
    jsonl.write_json(report / "provenance.json", asdict(findings.provenance))
    _say_verdict(findings)
    return _metrics(findings)


STAGE = Stage(
    name="report",
    function=report,
    config=ReportConfig,
    inputs=("base_evaluation", "sft_evaluation", "grpo_evaluation", "sft_training", "grpo_training", "validation"),
    outputs=("report",),
)


def _say_verdict(findings: Findings) -> None:
    if not findings.learned:
        say("report", "warning: GRPO learned nothing, no step had a gradient: the policy is its reference")
    verdict = findings.verdict
    reasons = "; ".join(part["reason"] for part in (verdict["target"], *verdict["others"]))
    say("report", f"gate {'passed' if verdict['passed'] else 'MISSED'}: {reasons}")


def _metrics(findings: Findings) -> dict[str, float]:
    target = findings.verdict["target"]
    accuracies = {
        f"{model}_accuracy_{source}": score["accuracy"]
        for model, scores in findings.by_source.items()
        for source, score in scores.items()
    }
    passed = float(findings.verdict["passed"])
    return {**accuracies, "gain": target["gain"], "p_value": target["p_value"], "gate_passed": passed}
