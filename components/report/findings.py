"""All that the report says, before it is put into words: evaluations, pairs, verdict, validation, provenance."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.report import provenance
from components.report.config import ReportConfig
from components.report.curves import read_steps
from components.report.evaluation import Evaluation, Pair, pair_up, read_evaluation
from components.report.gate import decide
from components.report.provenance import Provenance
from components.shared import jsonl, lineage

MODELS = {"base": "Base", "sft": "SFT", "grpo": "GRPO"}


@dataclass(frozen=True)
class Findings:
    """What the inputs of the report stage amount to."""

    evaluations: dict[str, Evaluation]
    pairs: list[Pair]
    """SFT first, GRPO second."""
    verdict: dict[str, Any]
    validation: dict[str, Any]
    provenance: Provenance
    learned: bool
    """Whether any step of GRPO had a gradient: without one the policy has the weights of its reference."""

    @property
    def sources(self) -> list[str]:
        """Sources of the test problems, the gate's target first."""
        return [*self.verdict["target"]["sources"], *(other["source"] for other in self.verdict["others"])]

    @property
    def by_source(self) -> dict[str, dict[str, Any]]:
        """Greedy scores by model and source."""
        return {
            model: {source: evaluation.scores["greedy"]["by_source"][source] for source in self.sources}
            for model, evaluation in self.evaluations.items()
        }

    def of_each_model(self, key: str) -> dict[str, Any]:
        """One of the scores over all greedy answers, by model."""
        return {model: evaluation.scores[key] for model, evaluation in self.evaluations.items()}

    def summary(self) -> dict[str, Any]:
        """The figures of a run in a few lines: what the runner prints and the model card repeats."""
        return {
            "models": self.by_source,
            "verdict": self.verdict,
            "learned": self.learned,
            "worked_fraction": self.of_each_model("worked_fraction"),
            "mean_length_tokens": self.of_each_model("mean_length_tokens"),
            "digests": {
                "problems": self.provenance.inputs.get("problems"),
                "params": self.provenance.params_digest,
            },
        }


def find(config: ReportConfig, folders: Mapping[str, Path]) -> Findings:
    """Read the inputs of the report stage, by their names in the graph, and decide the gate."""
    evaluations = {model: read_evaluation(folders[f"{model}_evaluation"]) for model in MODELS}
    pair_up(evaluations["base"], evaluations["sft"])
    pairs = pair_up(evaluations["sft"], evaluations["grpo"])
    return Findings(
        evaluations,
        pairs,
        decide(pairs, config.gate),
        jsonl.read_json(folders["validation"] / "result.json"),
        provenance.gather({name: lineage.read(folder) for name, folder in sorted(folders.items())}),
        any(row["gradient_norm"] for row in read_steps(folders["grpo_training"])),
    )
