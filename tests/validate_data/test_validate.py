"""Validation of sums that are good until a test spoils some of them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import dsl

from components.shared import jsonl, lineage
from components.shared.answer_policy import AnswerPolicy
from components.shared.config import validate as validated
from components.shared.errors import DataRejectedError, PipelineError
from components.shared.problem import Split, write_problems
from components.validate_data.checking import check
from components.validate_data.component import validate_data
from components.validate_data.config import ValidateConfig
from components.validate_data.frame import build_frame
from components.validate_data.gradable import grades
from components.validate_data.validate import validate
from tests import tiny

Lines = list[dict[str, Any]]
Spoil = Callable[[Lines, Lines], object]
_SPLITS = (Split.TRAIN, Split.TEST)
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


def run(problems: Path, validation: Path, spoil: Spoil | None = None, **changes: Any) -> dict[str, float]:
    """Validate, with the rows of both splits spoiled and some limits changed; return the metrics."""
    if spoil:
        splits = [[row for _, row in jsonl.read_rows(problems / f"{split}.jsonl")] for split in _SPLITS]
        spoil(*splits)
        for split, rows in zip(_SPLITS, splits, strict=True):
            jsonl.write_rows(problems / f"{split}.jsonl", rows)
    validation.mkdir()
    return validate(validated(ValidateConfig, PARAMS | changes, name=""), problems=problems, validation=validation)


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A folder of good problems: 20 and 10 sums, each with its work and a different answer."""
    folder = tmp_path / "problems"
    folder.mkdir()
    for split, first, size in ((Split.TRAIN, 0, 20), (Split.TEST, 1, 10)):
        rows = []
        for number in range(size):
            addend = 2 * number + first
            work = {"question": f"What is {addend} + 1?", "solution": f"{addend} + 1 = {addend + 1}\n#### {addend + 1}"}
            columns = {"id": f"sums/{split}/{number}", "answer": str(addend + 1)}
            rows.append(tiny.problem(1, split=split).model_copy(update={**columns, **work}))
        write_problems(folder, split, rows)
    return folder


def _missed(validation: Path) -> dict[str, dict[str, Any]]:
    outcomes = jsonl.read_json(validation / "result.json")["expectations"]
    return {outcome["name"]: outcome for outcome in outcomes if not outcome["success"]}


def test_good_problems_pass(problems: Path, tmp_path: Path) -> None:
    """Nothing is missed, the numbers of rows are metrics, and equal problems give equal bytes."""
    for name in ("first", "second"):
        metrics = run(problems, tmp_path / name)
    assert _missed(tmp_path / "first") == {}
    assert (metrics["train_rows"], metrics["test_rows"], metrics["missed_critical"]) == (20, 10, 0)
    result = jsonl.read_json(tmp_path / "first/result.json")
    assert (result["success"], result["rows"]) == (True, {"train": 20, "test": 10})
    assert result["statistics"]["worked_fraction"] == 1
    assert lineage.digest(tmp_path / "first") == lineage.digest(tmp_path / "second")


def test_problems_without_solutions_are_no_worse(problems: Path, tmp_path: Path) -> None:
    """Expectations apply to the solutions that there are; missing ones are reported if others exist."""

    def without(number: int) -> Spoil:
        return lambda train, test: [row.update(solution="") for row in [*train[:number], *test]]

    run(problems, tmp_path / "some", without(5), min_worked_fraction=1.0)
    assert list(_missed(tmp_path / "some")) == ["solutions"]
    assert _missed(tmp_path / "some")["solutions"]["unexpected"] == 5
    run(problems, tmp_path / "none", without(20), min_worked_fraction=1.0)
    assert _missed(tmp_path / "none") == {}
    assert jsonl.read_json(tmp_path / "none/result.json")["statistics"]["solution_tokens"] is None


def _spoil_everything(train: Lines, test: Lines) -> None:
    """Give rows of their own to the defects that reject problems."""
    train[0].update(level="3")
    train[3].update(hint="x")
    train[4].update(id="sums/test/4")
    train[5].update(question=test[5]["question"].upper().replace(" ", "  "))
    train[6].update(answer="99")
    for row in train[7:14]:
        row.update(question=row["question"] + "?" * 60)
    train.pop()
    test[2].update(question=" ")
    test[3].update(split="train")


REASONS = {
    "columns": "sums/train/3 (has hint)",
    "values": "sums/train/0 (level: ",
    "unique_ids": "sums/test/4 (train.jsonl:5) and 1 more",
    "splits": "sums/test/3",
    "train_rows": "19 rows",
    "gradable_answers": "sums/train/6 (answer 99, graded wrong)",
    "no_contamination": "sums/train/5 (as sums/test/5)",
    "prompt_length": "sums/train/7 (70 tokens), sums/train/8, sums/train/9 and 4 more",
}


def test_bad_problems_are_rejected_by_name(problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the expectation and the row, a line each the others; the outputs are written and say the same."""
    with pytest.raises(DataRejectedError) as error:
        run(problems, tmp_path / "validation", _spoil_everything)
    first, *others = REASONS
    message = str(error.value)
    assert message.startswith(f"`{first}` is not met (rows have exactly the columns of a problem): {REASONS[first]}")
    assert f"also not met: {', '.join(others)}; " in message
    assert message.endswith("`grpo-pipeline limits` proposes limits that fit")
    printed = capsys.readouterr().out.splitlines()
    for name in others:
        (line,) = [line for line in printed if f"critical: `{name}` is not met (" in line]
        assert REASONS[name] in line
    outcomes = _missed(tmp_path / "validation")
    assert [name for name in outcomes if outcomes[name]["severity"] == "critical"] == list(REASONS)
    assert outcomes["values"]["examples"][-1] == "sums/test/2"
    assert jsonl.read_json(tmp_path / "validation/result.json")["success"] is False
    assert "The problems are rejected" in (tmp_path / "validation/report.html").read_text(encoding="utf-8")


def test_nothing_at_all_is_rejected_too(problems: Path, tmp_path: Path) -> None:
    """Rows without a column, and splits without a row."""
    for name, how, message in (
        ("columns", lambda train, test: [row.clear() for row in [*train, *test]], r"jsonl:1 \(lacks answer, lacks id"),
        ("rows", lambda *splits: [rows.clear() for rows in splits], "0 rows; also not met: test_rows"),
    ):
        with pytest.raises(DataRejectedError, match=message):
            run(problems, tmp_path / name, how)


def _make_doubtful(train: Lines, test: Lines) -> None:
    for row in train[:3]:
        row.update(solution="+" * 60 + row["solution"])
    train[3].update(solution="")
    train[4].update(question=train[5]["question"])
    for row in train[8:12]:  # a fifth problem has it anyway
        row.update(answer="7")
    for row in train[5:]:
        row.update(solution=f"#### {row['answer']}")


def test_doubtful_problems_pass(problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An expectation that is not critical is counted, reported in the log, and does not stop the pipeline."""
    metrics = run(problems, tmp_path / "validation", _make_doubtful)
    counts = {name: outcome["unexpected"] for name, outcome in _missed(tmp_path / "validation").items()}
    doubts = {"solution_length": 3, "solutions": 1, "distinct_questions": 2, "answer_balance": 5}
    doubts["worked_solutions"] = 15
    assert counts == doubts
    assert (metrics["missed_warning"], metrics["missed_info"]) == (4, 1)
    printed = capsys.readouterr().out
    assert all(f"`{name}` is not met" in printed for name in doubts)


def test_solutions_have_to_declare_their_answer(problems: Path, tmp_path: Path) -> None:
    """A model that is to box its answers imitates a box in place of a mark, but there is none for a sentence."""
    model = PARAMS["model"] | {"answer": "boxed"}
    run(problems, tmp_path / "marked", model=model)
    assert _missed(tmp_path / "marked") == {}
    with pytest.raises(DataRejectedError, match="`gradable_answers` is not met"):
        run(problems, tmp_path / "none", lambda train, _: [row.update(solution="So 1") for row in train], model=model)
    assert set(_missed(tmp_path / "none")) == {"gradable_answers", "worked_solutions"}


def test_dev_problems_are_checked_and_counted_too(problems: Path, tmp_path: Path) -> None:
    """One that is asked in the train split as well, or repeats a test problem, rejects the data."""
    rows = [row for _, row in jsonl.read_rows(problems / "train.jsonl")]
    dev = [row | {"id": row["id"].replace("train", "dev"), "split": "dev"} for row in rows[15:]]
    jsonl.write_rows(problems / "train.jsonl", rows[:15])
    jsonl.write_rows(problems / "dev.jsonl", dev)
    assert run(problems, tmp_path / "good", min_train_rows=15)["dev_rows"] == 5
    assert '<th class="number">Dev</th>' in (tmp_path / "good" / "report.html").read_text("utf-8")
    jsonl.write_rows(problems / "train.jsonl", rows[:16])
    with pytest.raises(DataRejectedError, match=r"no_contamination.*: sums/train/15 \(as sums/dev/15\)"):
        run(problems, tmp_path / "bad", min_train_rows=15)


def test_answers_that_only_they_themselves_would_match_are_not_gradable() -> None:
    """Digits of any script, numbers with a unit, text and LaTeX are."""
    expected = dict.fromkeys(("\uff13\uff10\uff10", "12 apples", "New York City", r"(5, \frac{\pi}{3})"), "right")
    expected |= {r"1, 2, \ldots, n": "unscorable", "He has 12 apples.": "wrong"}
    problems = [tiny.problem(1).model_copy(update={"solution": "", "answer": answer}) for answer in expected]
    assert grades(problems, AnswerPolicy.DECLARED, imitated=True) == list(expected.values())
    assert grades([tiny.problem(1, solution=r"\boxed{2}.")], AnswerPolicy.MARKED, imitated=True) == ["right"]


def test_rule_that_cannot_be_evaluated_is_no_verdict_on_the_data(problems: Path) -> None:
    """It is reported as such, and the data are not called bad."""
    frame = build_frame(problems, validated(ValidateConfig, PARAMS, name=""))
    broken = {"type": "expect_column_sum_to_be_between", "kwargs": {"column": "row", "min_value": 1}}
    meta = {"name": "broken", "title": "Labels are numbers", "detail": ""}
    with pytest.raises(PipelineError, match="`broken` could not be evaluated") as error:
        check(frame, [{**broken, "severity": "critical", "meta": meta}])
    assert not error.value.keeps_outputs


def test_component_has_page_and_metrics(problems: Path, tmp_path: Path) -> None:
    """A task that fails has neither: Kubeflow would not keep them."""
    data = dsl.Dataset(uri=str(problems.parent))
    good, bad = (
        {name: dsl.Artifact(uri=str(tmp_path / place / name)) for name in ("validation", "data_page")}
        for place in ("good", "bad")
    )
    validate_data.python_func(config=PARAMS, data=data, **good)
    assert good["validation"].metadata["train_rows"] == 20
    page = tmp_path / "good/validation/validation/report.html"
    assert (tmp_path / "good/data_page").read_bytes() == page.read_bytes()
    (problems / "train.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="2"):
        validate_data.python_func(config=PARAMS, data=data, **bad)
    assert bad["validation"].metadata == {}
    assert not (tmp_path / "bad/data_page").exists()


@pytest.mark.slow
def test_command_prints_one_line_where_home_is_not_writable(problems: Path, tmp_path: Path) -> None:
    """Exit code 2, outputs in place, and neither torch nor transformers is loaded."""
    train, params, validation = problems / "train.jsonl", tmp_path / "params.yaml", tmp_path / "validation"
    train.write_text(train.read_text().replace('"answer": "7"', '"answer": "99"'))
    params.write_text(yaml.safe_dump({"validate_data": PARAMS}))
    for heavy in ("torch", "transformers"):
        (tmp_path / f"{heavy}.py").write_text(f"raise SystemExit('{heavy} was imported')")
    options = {"params": params, "problems": problems, "validation": validation}
    done = subprocess.run(
        [sys.executable, "-m", "components.validate_data", *(f"--{name}={path}" for name, path in options.items())],
        env={**os.environ, "HOME": "/proc/nowhere", "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "default"},
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
