"""What the report is about: the evaluations, the gate's verdict, the validation of the data, and the provenance."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from components.report.config import ReportConfig
from components.report.gate import decide
from components.shared import jsonl, lineage
from components.shared.config import validate
from components.shared.errors import PipelineError

MODELS = {"base": "Base", "sft": "SFT", "grpo": "GRPO"}


class Record(BaseModel):
    """One answer of a model; the keys of an evaluation's records that the report needs."""

    model_config = ConfigDict(frozen=True)

    id: str
    source: str
    question: str
    answer: str
    sample: int
    response: str
    verdict: Literal["right", "wrong", "unscorable"]
    num_tokens: int
    worked: bool


@dataclass(frozen=True)
class Evaluation:
    """One model's greedy answers by problem id, with its scores and lineage."""

    folder: Path
    greedy: dict[str, Record]
    scores: dict[str, Any]
    lineage: dict[str, Any] | None


@dataclass(frozen=True)
class Pair:
    """The answers of two models to one problem."""

    sft: Record
    grpo: Record

    @property
    def right(self) -> tuple[bool, bool]:
        """Whether each of the two is right; an unscorable answer is not."""
        return self.sft.verdict == "right", self.grpo.verdict == "right"


@dataclass(frozen=True)
class Provenance:
    """The stages behind a report, each once."""

    configs: dict[str, dict[str, Any]]
    """Config by stage, each after the stages whose outputs it reads."""
    inputs: dict[str, str]
    """Digest of each input artifact of a stage, by name."""
    code: str | None
    packages: dict[str, str]
    """Versions of each package in all the stages: they may have run in different images."""

    @property
    def params_digest(self) -> str | None:
        """One digest for all configs; None if no artifact has a lineage."""
        return lineage.value_digest(self.configs) if self.configs else None

    @property
    def base_model(self) -> str | None:
        """The name of the base model."""
        models = (config["model"] for config in self.configs.values() if isinstance(config.get("model"), dict))
        return next((str(model["base"]) for model in models if "base" in model), None)


@dataclass(frozen=True)
class Findings:
    """Everything the report says, before it is put into words."""

    evaluations: dict[str, Evaluation]
    pairs: list[Pair]
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

    def by_group(self, key: str) -> list[tuple[str, str, dict[str, Any]]]:
        """Source, group and each model's score by subject or level; nothing for a source with fewer than two groups."""
        rows = []
        for source in self.sources:
            scores = {name: each.scores["greedy"][key].get(source, {}) for name, each in self.evaluations.items()}
            groups = sorted(group for group in scores["grpo"] if group)
            if len(groups) > 1:
                rows += [(source, group, {name: scores[name][group] for name in MODELS}) for group in groups]
        return rows

    def by_model(self, key: str) -> dict[str, Any]:
        """One of the scores over all greedy answers, by model."""
        return {model: evaluation.scores[key] for model, evaluation in self.evaluations.items()}

    def summary(self) -> dict[str, Any]:
        """The figures of a run in a few lines, for the runner to print and the model card to repeat."""
        return {
            "models": self.by_source,
            "verdict": self.verdict,
            "learned": self.learned,
            "worked_fraction": self.by_model("worked_fraction"),
            "mean_length_tokens": self.by_model("mean_length_tokens"),
            "digests": {"problems": self.provenance.inputs.get("problems"), "params": self.provenance.params_digest},
        }


def find(config: ReportConfig, folders: Mapping[str, Path]) -> Findings:
    """Read the inputs of the report stage, by their names in the graph, and decide the gate."""
    evaluations = {model: _read_evaluation(folders[f"{model}_evaluation"]) for model in MODELS}
    _check_comparable(evaluations["base"], evaluations["sft"])
    _check_comparable(evaluations["sft"], evaluations["grpo"])
    answers = evaluations["grpo"].greedy
    pairs = [Pair(record, answers[record.id]) for record in evaluations["sft"].greedy.values()]
    return Findings(
        evaluations,
        pairs,
        decide(pairs, config.gate),
        jsonl.read_json(folders["validation"] / "result.json"),
        collect_provenance({name: lineage.read(folder) for name, folder in sorted(folders.items())}),
        learned=any(row["gradient_norm"] for _, row in jsonl.read_rows(folders["grpo_training"] / "steps.jsonl")),
    )


def _read_evaluation(folder: Path) -> Evaluation:
    """Return an evaluation; PipelineError unless its records and scores agree."""
    path = folder / "records.jsonl"
    greedy: dict[str, Record] = {}
    for number, row in jsonl.read_rows(path):
        record = validate(Record, row, name=f"{path}:{number}")
        if record.sample != 0:
            continue
        if record.id in greedy:
            raise PipelineError(f"{path}:{number}: second greedy answer to problem {record.id}; evaluate again")
        greedy[record.id] = record
    if not greedy:
        raise PipelineError(f"{path}: contains no greedy answer (sample 0); evaluate again")
    scores = jsonl.read_json(folder / "scores.json")
    _check_scores(folder / "scores.json", scores, list(greedy.values()))
    return Evaluation(folder, greedy, scores, lineage.read(folder))


def _check_scores(path: Path, scores: Any, records: Sequence[Record]) -> None:
    """Tables show the scores and the gate counts records: both must be of one evaluation."""
    try:
        scored = {source: score["correct"] for source, score in scores["greedy"]["by_source"].items()}
    except (KeyError, TypeError):
        raise PipelineError(f"{path}: expected greedy scores by source, `greedy.by_source.<source>.correct`") from None
    counted = dict.fromkeys((record.source for record in records), 0)
    for record in records:
        counted[record.source] += record.verdict == "right"
    if scored != counted:
        raise PipelineError(
            f"{path}: has {scored} right answers, but records.jsonl next to it has {counted}; evaluate again"
        )


def _check_comparable(first: Evaluation, second: Evaluation) -> None:
    """Raise PipelineError unless two models answered the same problems under the same settings."""
    if first.lineage and second.lineage and first.lineage["config"] != second.lineage["config"]:
        raise PipelineError(
            f"{second.folder}: evaluated under another config than {first.folder}; evaluate both under the same"
        )
    same = "evaluate both models on the same problems"
    for one, other in ((first, second), (second, first)):
        missing = one.greedy.keys() - other.greedy.keys()
        if missing:
            raise PipelineError(
                f"{other.folder}: has no answer to {len(missing)} of the problems in {one.folder}, "
                f"such as {min(missing)}; {same}"
            )
    for record in first.greedy.values():
        other_record = second.greedy[record.id]
        if (record.source, record.answer) != (other_record.source, other_record.answer):
            raise PipelineError(
                f"{second.folder}: problem {record.id} has another source or answer than in {first.folder}; {same}"
            )


def collect_provenance(lineages: Mapping[str, dict[str, Any] | None]) -> Provenance:
    """Return the provenance of artifacts by name; two configs of one stage mean that runs were mixed."""
    configs: dict[str, dict[str, Any]] = {}
    inputs: dict[str, str] = {}
    code: str | None = None
    packages: dict[str, set[str]] = {}
    depths: dict[str, int] = {}
    for name, top in lineages.items():
        for made in _walk(top):
            stage, code = made["stage"], made["code"]
            depths[stage] = max(depths.get(stage, 0), _depth(made))
            if configs.setdefault(stage, made["config"]) != made["config"]:
                raise PipelineError(
                    f"report: input `{name}` was made under another config of {stage} than the inputs before it; "
                    "use the outputs of one run"
                )
            for artifact, entry in made["inputs"].items():
                # Each evaluation calls its model `model`.
                inputs[f"{name.partition('_')[0]} model" if artifact == "model" else artifact] = entry["digest"]
            for package, version in made["packages"].items():
                packages.setdefault(package, set()).add(version)
    ordered = sorted(configs, key=lambda stage: (depths[stage], stage))
    versions = {package: ", ".join(sorted(each)) for package, each in sorted(packages.items())}
    return Provenance({stage: configs[stage] for stage in ordered}, inputs, code, versions)


def _walk(made: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if made is None:
        return
    for entry in made["inputs"].values():
        yield from _walk(entry["lineage"])
    yield made


def _depth(made: dict[str, Any]) -> int:
    """Return the length of the longest chain of stages before this one."""
    chains = (_depth(entry["lineage"]) for entry in made["inputs"].values() if entry["lineage"] is not None)
    return 1 + max(chains, default=-1)
