from collections.abc import Sequence
from pathlib import Path

import pytest

from components.evaluate.config import EvaluateConfig
from components.evaluate.evaluate import _answers, _Examination, evaluate
from components.grading.verifier import Verifier
from components.policy.checkpoint import save
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion
from components.shared import jsonl, lineage
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, write_problems
from tests import tiny

TESTED = [tiny.problem(number, split=Split.TEST) for number in (9, 12, 2, 7, 123)]


def _evaluate(
    folder: Path,
    problems: list[Problem] = TESTED,
    *,
    num_samples: int = 2,
    max_batch_size: int = 4,
    max_new_tokens: int = 6,
) -> Path:
    """Examine the untrained tiny model; return the folder of the evaluation."""
    model, data, evaluation = folder / "model", folder / "problems", folder / "evaluation"
    for path in (model, data, evaluation):
        path.mkdir(parents=True)
    save(tiny.checkpoint(), model)
    write_problems(data, Split.TEST, problems)
    config = EvaluateConfig(
        seed=1,
        num_samples=num_samples,
        temperature=1.0,
        max_new_tokens=max_new_tokens,
        max_batch_size=max_batch_size,
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


def test_answers_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    """It says how much was asked for, and which keys lower it."""
    with pytest.raises(PipelineError, match=r"^not enough memory for answers to 4 problems at once: .* TiB") as error:
        _evaluate(tmp_path, max_new_tokens=10**12)
    assert "lower evaluate.max_batch_size (it is 4), or lower evaluate.max_new_tokens" in str(error.value)


@pytest.mark.parametrize("policy", [AnswerPolicy.MARKED, AnswerPolicy.BOXED])
def test_each_completion_is_graded_against_its_own_problem(policy: AnswerPolicy) -> None:
    """Where the model's prompt asks for the answer, and not at all where it was cut off."""

    def generate(questions: Sequence[str], *, num_samples: int, **_: object) -> list[list[Completion]]:
        answers = {problem.question: problem.answer for problem in TESTED}
        texts = ("so\n#### {}", r"\boxed{{{}}}", "#### {}", r"so \boxed{{{}1}} or #### {}1")
        return [
            [
                Completion(TokenSequence((1,), (2,)), (-1.0,), texts[n].format(*[answers[question]] * 2), n != 2)
                for n in range(num_samples)
            ]
            for question in questions
        ]

    config = EvaluateConfig(seed=1, num_samples=4, temperature=1.0, max_new_tokens=6, max_batch_size=8)
    with Verifier() as verify:
        records = _answers(_Examination(config, generate, verify, policy), TESTED)
    for problem in TESTED:
        greedy, *drawn = (record for record in records if record["id"] == problem.id)
        marked, boxed, cut_off, wrong = (record["verdict"] == "right" for record in drawn)
        assert (greedy["verdict"] == "right") is marked is (policy is AnswerPolicy.MARKED)
        assert boxed is (policy is AnswerPolicy.BOXED)
        assert not cut_off
        assert not wrong
        assert drawn[2]["reason"] == "cut off at the length limit"
        assert drawn[0]["worked"] is marked


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
