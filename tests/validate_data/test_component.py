from pathlib import Path

import pytest
from kfp import dsl

from components.shared import jsonl
from components.shared.problem import Split, write_problems
from components.validate_data.component import validate_data
from tests.validate_data.sums import PARAMS, problem


def artifacts(folder: Path, answer: str) -> dict[str, dsl.Artifact]:
    """Good problems but for the first answer, and places for the outputs."""
    problems = folder / "problems"
    problems.mkdir()
    train = [problem(Split.TRAIN, number) for number in range(20)]
    write_problems(problems, Split.TRAIN, [train[0].model_copy(update={"answer": answer}), *train[1:]])
    write_problems(problems, Split.TEST, (problem(Split.TEST, number) for number in range(10)))
    return {
        "problems": dsl.Dataset(uri=str(problems)),
        "validation": dsl.Artifact(uri=str(folder / "validation")),
        "page": dsl.HTML(uri=str(folder / "made/page.html")),
        "metrics": dsl.Metrics(uri=str(folder / "metrics")),
    }


def test_metrics_and_page_are_shown(tmp_path: Path) -> None:
    """Kubeflow gets the page and the counts."""
    made = artifacts(tmp_path, answer="1")
    validate_data.python_func(config=PARAMS, **made)
    assert (tmp_path / "made/page.html").read_bytes() == (tmp_path / "validation/report.html").read_bytes()
    assert made["metrics"].metadata["train_rows"] == 20


def test_the_page_is_shown_when_the_problems_are_rejected(tmp_path: Path) -> None:
    """Whoever looks at the failed task sees why it failed."""
    with pytest.raises(SystemExit) as error:
        validate_data.python_func(config=PARAMS, **artifacts(tmp_path, answer="2"))
    assert error.value.code == 2
    assert "The problems are rejected" in (tmp_path / "made/page.html").read_text(encoding="utf-8")
    assert jsonl.read_json(tmp_path / "validation/result.json")["success"] is False


def test_a_config_error_has_no_page(tmp_path: Path) -> None:
    """Nothing was looked at, so nothing is shown."""
    with pytest.raises(SystemExit):
        validate_data.python_func(config=PARAMS | {"max_prompt_tokens": 0}, **artifacts(tmp_path, answer="1"))
    assert not (tmp_path / "made").exists()
