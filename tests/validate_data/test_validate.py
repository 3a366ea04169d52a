"""Validation of sums that are good until a test spoils some of them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from kfp import dsl

from components.shared import jsonl, lineage
from components.shared.config import validate as validated
from components.shared.errors import DataRejectedError, PipelineError
from components.shared.problem import Problem, Split, write_problems
from components.validate_data.component import validate_data
from components.validate_data.config import ValidateConfig
from components.validate_data.expectations import Expectation, Rule, Severity, check
from components.validate_data.frame import build_frame, describe, load_rows
from components.validate_data.validate import validate

Lines = list[dict[str, Any]]
Spoil = Callable[[Lines, Lines], object]
PARAMS: dict[str, Any] = {
    "model": {"base": "scratch:tiny", "prompt": "{question}\n", "answer": "declared"},
    "max_prompt_tokens": 60,
    "max_solution_tokens": 60,
    "min_within_limit_fraction": 0.9,
    "min_train_rows": 20,
    "min_test_rows": 10,
    "max_answer_share": 0.2,
    "min_worked_fraction": 0.3,
}


def make_problem(split: Split, number: int) -> Problem:
    """Return a sum that no other number has, with its work."""
    left = 2 * number + (split == Split.TEST)
    return Problem(
        id=f"sums/{split}/{number}",
        source="sums",
        split=split,
        question=f"What is {left} + 1?",
        solution=f"{left} + 1 = {left + 1}\n#### {left + 1}",
        answer=str(left + 1),
        subject="",
        level=None,
    )


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A folder of good problems."""
    folder = tmp_path / "problems"
    folder.mkdir()
    write_problems(folder, Split.TRAIN, (make_problem(Split.TRAIN, number) for number in range(20)))
    write_problems(folder, Split.TEST, (make_problem(Split.TEST, number) for number in range(10)))
    return folder


def run(problems: Path, validation: Path, **changes: Any) -> dict[str, float]:
    """Validate with some limits changed and return the metrics."""
    validation.mkdir(exist_ok=True)
    return validate(validated(ValidateConfig, PARAMS | changes, name=""), problems=problems, validation=validation)


def spoil(problems: Path, how: Spoil) -> None:
    """Change the rows of both splits in place."""
    train, test = ([row for _, row in jsonl.read_rows(problems / f"{split}.jsonl")] for split in Split)
    how(train, test)
    jsonl.write_rows(problems / "train.jsonl", train)
    jsonl.write_rows(problems / "test.jsonl", test)


def missed(validation: Path) -> dict[str, dict[str, Any]]:
    """Return the expectations of result.json that are not met, by name."""
    outcomes = jsonl.read_json(validation / "result.json")["expectations"]
    return {outcome["name"]: outcome for outcome in outcomes if not outcome["success"]}


def test_good_problems_pass(problems: Path, tmp_path: Path) -> None:
    """Nothing is missed, the numbers of rows are metrics, and equal problems give equal bytes."""
    for name in ("first", "second"):
        metrics = run(problems, tmp_path / name)
    assert missed(tmp_path / "first") == {}
    assert (metrics["train_rows"], metrics["test_rows"], metrics["missed_critical"]) == (20, 10, 0)
    result = jsonl.read_json(tmp_path / "first/result.json")
    assert result["success"] is True
    assert result["rows"] == {"train": 20, "test": 10}
    assert result["statistics"]["worked_fraction"] == 1
    assert lineage.digest(tmp_path / "first") == lineage.digest(tmp_path / "second")


CRITICAL: list[tuple[str, Spoil, str]] = [
    ("columns", lambda train, test: train[3].update(hint="x"), "sums/train/3 (has hint)"),
    ("columns", lambda train, test: train[3].pop("source"), "sums/train/3 (lacks source)"),
    ("values", lambda train, test: test[3].update(question=" "), "sums/test/3 (question: is blank)"),
    ("unique_ids", lambda train, test: train[3].update(id="sums/test/4"), "sums/test/4 (train.jsonl:4) and 1 more"),
    ("splits", lambda train, test: test[3].update(split="train"), "sums/test/3"),
    ("gradable_answers", lambda train, test: train[3].update(answer="99"), "sums/train/3 (answer 99, graded wrong)"),
    ("gradable_answers", lambda train, test: train[3].update(solution="it is 7"), "(answer 7, graded wrong)"),
    (
        "gradable_answers",
        lambda train, test: test[3].update(answer=r"\frac{", solution=""),
        r"sums/test/3 (answer \frac{, graded ",
    ),
    (
        "no_contamination",
        lambda train, test: train[3].update(question=test[5]["question"].upper().replace(" ", "  ")),
        "sums/train/3 (as sums/test/5)",
    ),
    (
        "prompt_length",
        lambda train, test: [row.update(question=row["question"] + "?" * 60) for row in train[:7]],
        "sums/train/0 (70 tokens), sums/train/1, sums/train/2 and 4 more",
    ),
    ("train_rows", lambda train, test: train.pop(), "19 rows"),
    ("test_rows", lambda train, test: test.clear(), "0 rows"),
]


@pytest.mark.parametrize(("name", "how", "message"), CRITICAL)
def test_bad_problems_are_rejected_by_name(problems: Path, tmp_path: Path, name: str, how: Spoil, message: str) -> None:
    """One line names the expectation and the row; the outputs are written and say the same."""
    spoil(problems, how)
    with pytest.raises(DataRejectedError) as error:
        run(problems, tmp_path / "validation")
    assert message in str(error.value)
    assert f"`{name}`" in str(error.value)
    assert "\n" not in str(error.value)
    assert name in missed(tmp_path / "validation")
    assert jsonl.read_json(tmp_path / "validation/result.json")["success"] is False
    assert "The problems are rejected" in (tmp_path / "validation/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "label", "defect"),
    [
        ({"level": "3"}, "sums/train/0", "level: "),
        ({"answer": None}, "sums/train/0", "answer: "),
        ({"id": ""}, "train.jsonl:1", "id: "),
        ({"id": " "}, "train.jsonl:1", "id: is blank"),
    ],
)
def test_invalid_row_is_read_with_its_defect(problems: Path, change: dict[str, Any], label: str, defect: str) -> None:
    """Types are strict, texts are not blank, and a row without an id is named by file and line."""
    spoil(problems, lambda train, test: train[0].update(change))
    row = load_rows(problems)[0]
    assert (row.label, row.problem) == (label, None)
    assert row.defect.startswith(defect)


NOT_CRITICAL: list[tuple[str, Spoil, int]] = [
    ("solution_length", lambda train, test: [row.update(solution="+" * 60 + row["solution"]) for row in train[:3]], 3),
    ("solutions", lambda train, test: train[3].update(solution=""), 1),
    ("distinct_questions", lambda train, test: train[3].update(question=train[4]["question"]), 2),
    (
        "answer_balance",
        lambda train, test: [row.update(answer="7", solution="5 + 2 = 7\n#### 7") for row in train[3:8]],
        5,
    ),
    ("worked_solutions", lambda train, test: [row.update(solution=f"#### {row['answer']}") for row in train[:15]], 15),
]


@pytest.mark.parametrize(("name", "how", "unexpected"), NOT_CRITICAL)
def test_doubtful_problems_are_reported_but_pass(
    problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, how: Spoil, unexpected: int
) -> None:
    """An expectation that is not critical is counted, reported in the log, and does not stop the pipeline."""
    spoil(problems, how)
    metrics = run(problems, tmp_path / "validation")
    (outcome,) = missed(tmp_path / "validation").values()
    assert (outcome["name"], outcome["unexpected"]) == (name, unexpected)
    assert metrics["missed_warning"] + metrics["missed_info"] == 1
    assert f"`{name}` is not met" in capsys.readouterr().out


def test_solutions_have_to_answer_as_the_prompt_asks(problems: Path, tmp_path: Path) -> None:
    """A model that is to box its answers cannot learn it from solutions that mark theirs."""
    with pytest.raises(DataRejectedError, match="`gradable_answers` is not met"):
        run(problems, tmp_path / "validation", model=PARAMS["model"] | {"answer": "boxed"})
    assert set(missed(tmp_path / "validation")) == {"gradable_answers", "worked_solutions"}


def test_problem_without_a_solution_is_graded_by_its_answer(problems: Path, tmp_path: Path) -> None:
    """In the test split a readable answer is enough, and a share of long prompts is allowed but counted."""
    spoil(problems, lambda train, test: [test[3].update(solution=""), train[0].update(question="?" * 100)])
    run(problems, tmp_path / "validation", model=PARAMS["model"] | {"answer": "marked"})
    outcomes = {each["name"]: each for each in jsonl.read_json(tmp_path / "validation/result.json")["expectations"]}
    assert outcomes["gradable_answers"]["success"]
    length = outcomes["prompt_length"]
    assert (length["success"], length["checked"], length["unexpected"]) == (True, 30, 1)


def test_all_missed_critical_expectations_are_named(problems: Path, tmp_path: Path) -> None:
    """The first is explained and the others are named, in one line."""
    spoil(problems, lambda train, test: [train[3].update(split="test"), train[4].update(answer="99")])
    with pytest.raises(DataRejectedError, match=r"`splits` .* also not met: gradable_answers"):
        run(problems, tmp_path / "validation")


def test_rows_without_any_column_are_rejected(problems: Path, tmp_path: Path) -> None:
    """Expectations that apply to no row neither crash nor hide that the data are bad."""
    spoil(problems, lambda train, test: [row.pop(name) for row in [*train, *test] for name in list(row)])
    with pytest.raises(DataRejectedError, match=r"train\.jsonl:1 .* and 27 more"):
        run(problems, tmp_path / "validation")


def test_rule_that_cannot_be_evaluated_is_no_verdict_on_the_data(problems: Path) -> None:
    """It is reported as such, and the data are not called bad."""
    frame = build_frame(load_rows(problems), validated(ValidateConfig, PARAMS, name=""))
    rule = Rule("ExpectColumnSumToBeBetween", "row", {"min_value": 1})
    with pytest.raises(PipelineError, match="`broken` could not be evaluated") as error:
        check(frame, [Expectation("broken", "Labels are numbers", Severity.CRITICAL, rule)])
    assert not error.value.keeps_outputs


@pytest.mark.parametrize("content", [b'{"id": ', b"\xff\xfe"])
def test_file_that_is_not_json_lines_is_an_error(problems: Path, tmp_path: Path, content: bytes) -> None:
    """A truncated or binary file is named with its line, and is not bad data."""
    path = problems / "train.jsonl"
    path.write_bytes(path.read_bytes() + content)
    with pytest.raises(PipelineError, match=r"train\.jsonl:21") as error:
        run(problems, tmp_path / "validation")
    assert not error.value.keeps_outputs


@pytest.mark.parametrize("order", [1, -1])
def test_quantiles_of_lengths(order: int) -> None:
    """Of the lengths 0 to 100 in any order the median is 50 and the 95th percentile 95."""
    lengths = list(range(101))[::order]
    frame = pd.DataFrame({"worked": True, "prompt_tokens": lengths, "solution_tokens": [2 * each for each in lengths]})
    described = describe(frame, [])
    quantiles = {name: described["prompt_tokens"][name] for name in ("min", "median", "p95", "max")}
    assert quantiles == {"min": 0, "median": 50, "p95": 95, "max": 100}
    assert described["solution_tokens"]["p95"] == 190


def test_page_is_self_contained(problems: Path, tmp_path: Path) -> None:
    """It is one file, and markup in the problems stays text."""
    spoil(problems, lambda train, test: train[0].update(question="<script>1 < 2</script> What is 0 + 1?"))
    run(problems, tmp_path / "validation")
    page = (tmp_path / "validation/report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;1 &lt; 2&lt;/script&gt; What is 0 + 1?" in page
    for forbidden in ("http:", "https:", "<script", "<link", "@import", "url("):
        assert forbidden not in page


@pytest.mark.parametrize(("answer", "exit_code"), [("1", None), ("99", 2)])
def test_kubeflow_component_shows_page_and_metrics(
    problems: Path, tmp_path: Path, answer: str, exit_code: int | None
) -> None:
    """Rejected problems leave the page too: whoever looks at the failed task sees why it failed."""
    spoil(problems, lambda train, test: train[0].update(answer=answer))
    artifacts = {
        "problems": dsl.Dataset(uri=str(problems)),
        "validation": dsl.Artifact(uri=str(tmp_path / "validation")),
        "page": dsl.HTML(uri=str(tmp_path / "html/page.html")),
        "metrics": dsl.Metrics(uri=str(tmp_path / "metrics")),
    }
    if exit_code is None:
        validate_data.python_func(config=PARAMS, **artifacts)
        assert artifacts["metrics"].metadata["train_rows"] == 20
    else:
        with pytest.raises(SystemExit) as error:
            validate_data.python_func(config=PARAMS, **artifacts)
        assert error.value.code == exit_code
    assert (tmp_path / "html/page.html").read_bytes() == (tmp_path / "validation/report.html").read_bytes()


def test_config_error_leaves_no_page(problems: Path, tmp_path: Path) -> None:
    """Nothing was validated, so nothing is shown."""
    artifacts = {name: dsl.Artifact(uri=str(tmp_path / name)) for name in ("validation", "page", "metrics")}
    with pytest.raises(SystemExit):
        validate_data.python_func(
            config=PARAMS | {"max_prompt_tokens": 0}, problems=dsl.Dataset(uri=str(problems)), **artifacts
        )
    assert not (tmp_path / "page").exists()


@pytest.mark.slow
def test_command_prints_one_line_where_home_is_not_writable(problems: Path, tmp_path: Path) -> None:
    """Exit code 2, outputs in place, and neither torch nor transformers is loaded."""
    spoil(problems, lambda train, test: train[3].update(answer="99"))
    params, validation = tmp_path / "params.yaml", tmp_path / "validation"
    params.write_text(yaml.safe_dump({"validate_data": PARAMS}))
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "transformers.py").write_text("raise SystemExit('transformers was imported')")
    command = [
        *("-m", "components.validate_data", "--params", str(params)),
        *("--problems", str(problems), "--validation", str(validation)),
    ]
    done = subprocess.run(
        [sys.executable, "-W", "default", *command],
        env={**os.environ, "HOME": "/proc/nowhere", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines() == [
        "error: validate_data: `gradable_answers` is not met (the grader finds that each solution ends in its answer): "
        "sums/train/3 (answer 99, graded wrong); report.html has the details"
    ]
    assert done.returncode == 2
    assert {path.name for path in validation.iterdir()} == {"result.json", "report.html", "lineage.json"}
