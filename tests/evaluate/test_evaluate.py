from pathlib import Path

import pytest

from components.evaluate.config import EvaluateConfig
from components.evaluate.evaluate import evaluate
from components.policy.checkpoint import save
from components.shared import jsonl, lineage
from components.shared.problem import Problem, Split, write_problems
from tests import tiny

TESTED = [tiny.problem(number, split=Split.TEST) for number in (9, 12, 2, 7, 123)]


def _evaluate(folder: Path, problems: list[Problem] = TESTED, *, num_samples: int = 2, max_batch_size: int = 4) -> Path:
    """Examine the untrained tiny model; return the folder of the evaluation."""
    model, data, evaluation = folder / "model", folder / "problems", folder / "evaluation"
    for path in (model, data, evaluation):
        path.mkdir(parents=True)
    save(tiny.checkpoint(), model)
    write_problems(data, Split.TEST, problems)
    config = EvaluateConfig(
        seed=1, num_samples=num_samples, temperature=1.0, max_new_tokens=6, max_batch_size=max_batch_size
    )
    metrics = evaluate(config, model=model, problems=data, evaluation=evaluation)
    assert metrics["sums_accuracy"] == jsonl.read_json(evaluation / "scores.json")["greedy"]["all"]["accuracy"]
    return evaluation


def test_there_is_a_record_for_every_problem_and_sample(tmp_path: Path) -> None:
    """In the order of the problems, the greedy answer first, whatever the order they were answered in."""
    rows = [row for _, row in jsonl.read_rows(_evaluate(tmp_path) / "records.jsonl")]
    expected = [(problem.id, sample, problem.question) for problem in TESTED for sample in (0, 1, 2)]
    assert [(row["id"], row["sample"], row["question"]) for row in rows] == expected
    assert all(row["num_tokens"] <= 6 for row in rows)


def test_greedy_answers_do_not_depend_on_batches(tmp_path: Path) -> None:
    """One problem at a time or all at once: the same greedy records."""
    greedy = []
    for size in (1, 64):
        rows = jsonl.read_rows(_evaluate(tmp_path / str(size), max_batch_size=size) / "records.jsonl")
        greedy.append([row for _, row in rows if row["sample"] == 0])
    assert greedy[0] == greedy[1]


def test_equal_examinations_are_equal_to_the_byte(tmp_path: Path) -> None:
    """Drawn answers included."""
    one, two = (lineage.digest(_evaluate(tmp_path / name)) for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("num_samples", [0, 1])
def test_drawing_is_optional(tmp_path: Path, num_samples: int) -> None:
    """Without samples there are greedy records only."""
    rows = list(jsonl.read_rows(_evaluate(tmp_path, num_samples=num_samples) / "records.jsonl"))
    assert len(rows) == len(TESTED) * (1 + num_samples)
