"""Evaluations as the report reads them, and the pairing of two models' answers to the same problems."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from components.shared import jsonl, lineage
from components.shared.config import validate
from components.shared.errors import PipelineError

Outcome = Literal["right", "wrong", "unscorable"]


class Record(BaseModel):
    """One answer of a model; the keys of an evaluation's records that the report needs."""

    model_config = ConfigDict(frozen=True)

    id: str
    source: str
    question: str
    answer: str
    sample: int
    response: str
    extracted: str | None
    verdict: Outcome
    num_tokens: int
    worked: bool


@dataclass(frozen=True)
class Evaluation:
    """One model's greedy answers by problem id, with its scores and lineage."""

    folder: Path
    greedy: dict[str, Record]
    scores: dict[str, Any]
    lineage: dict[str, Any] | None

    def count(self, source: str, outcome: Outcome) -> int:
        """How many problems of a source came out like this."""
        return sum(record.source == source and record.verdict == outcome for record in self.greedy.values())


@dataclass(frozen=True)
class Pair:
    """Two models' answers to one problem."""

    first: Record
    second: Record

    @property
    def source(self) -> str:
        """The dataset of the problem."""
        return self.first.source

    @property
    def right(self) -> tuple[bool, bool]:
        """Whether each of the two is right; an unscorable answer is not."""
        return self.first.verdict == "right", self.second.verdict == "right"


def read_evaluation(folder: Path) -> Evaluation:
    """Return an evaluation whose records and scores agree; anything else is an error."""
    path = folder / "records.jsonl"
    greedy: dict[str, Record] = {}
    for number, row in jsonl.read_rows(path):
        record = validate(Record, row, name=f"{path}:{number}")
        if record.sample != 0:
            continue
        if record.id in greedy:
            raise PipelineError(f"{path}:{number}: second greedy answer to problem {record.id}")
        greedy[record.id] = record
    if not greedy:
        raise PipelineError(f"{path}: holds no greedy answer (sample 0)")
    evaluation = Evaluation(folder, greedy, jsonl.read_json(folder / "scores.json"), lineage.read(folder))
    _check_scores(evaluation)
    return evaluation


def _check_scores(evaluation: Evaluation) -> None:
    """Scores are what tables show and records what the gate counts: they must be of one evaluation."""
    path = evaluation.folder / "scores.json"
    try:
        scored = {source: score["correct"] for source, score in evaluation.scores["greedy"]["by_source"].items()}
    except (KeyError, TypeError):
        raise PipelineError(f"{path}: expected greedy scores by source, `greedy.by_source.<source>.correct`") from None
    sources = {record.source for record in evaluation.greedy.values()}
    counted = {source: evaluation.count(source, "right") for source in sources}
    if scored != counted:
        raise PipelineError(f"{path}: counts {scored} right, but records.jsonl beside it {counted}; evaluate again")


def pair_up(first: Evaluation, second: Evaluation) -> list[Pair]:
    """Return the two models' answers problem by problem, in the order of the first; each must have its partner."""
    _check_same_terms(first, second)
    for one, other in ((first, second), (second, first)):
        missing = one.greedy.keys() - other.greedy.keys()
        if missing:
            raise PipelineError(
                f"{other.folder}: has no answer to {len(missing)} of the problems that {one.folder} answers, "
                f"such as {min(missing)}; evaluate both models on the same problems"
            )
    pairs = [Pair(record, second.greedy[record.id]) for record in first.greedy.values()]
    for pair in pairs:
        if (pair.first.source, pair.first.answer) != (pair.second.source, pair.second.answer):
            raise PipelineError(
                f"{second.folder}: problem {pair.first.id} is not the one that {first.folder} answers "
                "(another source or answer); evaluate both models on the same problems"
            )
    return pairs


def _check_same_terms(first: Evaluation, second: Evaluation) -> None:
    """Models answering under different settings cannot be compared, whatever the numbers say."""
    if first.lineage is None or second.lineage is None:
        return
    if first.lineage["config"] != second.lineage["config"]:
        raise PipelineError(
            f"{second.folder}: was evaluated under another config than {first.folder}; evaluate both under one"
        )
