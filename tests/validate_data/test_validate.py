import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.shared import jsonl, lineage
from components.shared.config import validate as validated
from components.shared.errors import DataRejectedError, PipelineError
from components.shared.problem import Split, write_problems
from components.validate_data import suite
from components.validate_data.config import ValidateConfig
from components.validate_data.expectations import Expectation, Rule, Severity
from components.validate_data.frame import derive
from components.validate_data.rows import read
from components.validate_data.validate import validate
from tests.validate_data.sums import PARAMS, problem

Lines = list[dict[str, Any]]
Spoil = Callable[[Lines, Lines], object]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A folder of good problems."""
    folder = tmp_path / "problems"
    folder.mkdir()
    write_problems(folder, Split.TRAIN, (problem(Split.TRAIN, number) for number in range(20)))
    write_problems(folder, Split.TEST, (problem(Split.TEST, number) for number in range(10)))
    return folder


def run(problems: Path, validation: Path, **changes: Any) -> dict[str, float]:
    """The metrics of validation with some limits changed."""
    validation.mkdir(exist_ok=True)
    return validate(validated(ValidateConfig, PARAMS | changes, name=""), problems=problems, validation=validation)


def spoil(problems: Path, how: Spoil) -> None:
    """Change the rows of both splits in place."""
    train, test = ([row for _, row in jsonl.read_rows(problems / f"{split}.jsonl")] for split in Split)
    how(train, test)
    jsonl.write_rows(problems / "train.jsonl", train)
    jsonl.write_rows(problems / "test.jsonl", test)


def outcome(validation: Path, name: str) -> dict[str, Any]:
    """What result.json says of one expectation."""
    result = jsonl.read_json(validation / "result.json")
    return next(expectation for expectation in result["expectations"] if expectation["name"] == name)


def missed(validation: Path) -> set[str]:
    """Names of the expectations that are not met."""
    result = jsonl.read_json(validation / "result.json")
    return {expectation["name"] for expectation in result["expectations"] if not expectation["success"]}


def test_good_problems_pass(problems: Path, tmp_path: Path) -> None:
    """Nothing is missed, and the numbers of rows are metrics."""
    metrics = run(problems, tmp_path / "validation")
    assert missed(tmp_path / "validation") == set()
    assert (metrics["train_rows"], metrics["test_rows"], metrics["missed_critical"]) == (20, 10, 0)
    result = jsonl.read_json(tmp_path / "validation/result.json")
    assert result["success"] is True
    assert result["rows"] == {"train": 20, "test": 10}
    assert result["statistics"]["worked_fraction"] == 1


def test_solutions_have_to_answer_where_the_prompt_asks_them_to(problems: Path, tmp_path: Path) -> None:
    """A model that is to box its answers cannot learn it from solutions that mark theirs."""
    with pytest.raises(DataRejectedError, match="`gradable_answers` is not met"):
        run(problems, tmp_path / "validation", model=PARAMS["model"] | {"answer": "boxed"})
    assert missed(tmp_path / "validation") == {"gradable_answers", "worked_solutions"}


def test_a_problem_without_a_solution_is_graded_by_its_answer(problems: Path, tmp_path: Path) -> None:
    """An answer that the grader can read is enough in the test split, wherever the prompt asks for it."""
    spoil(problems, lambda train, test: test[3].update(solution=""))
    run(problems, tmp_path / "validation", model=PARAMS["model"] | {"answer": "marked"})
    assert "gradable_answers" not in missed(tmp_path / "validation")


CRITICAL: list[tuple[str, Spoil, str]] = [
    ("columns", lambda train, test: train[3].update(hint="x"), "sums/train/3 (has hint)"),
    ("columns", lambda train, test: train[3].pop("source"), "sums/train/3 (lacks source)"),
    ("values", lambda train, test: train[3].update(level="3"), "sums/train/3 (level: "),
    ("values", lambda train, test: test[3].update(question=" "), "sums/test/3 (question: is blank)"),
    ("values", lambda train, test: test[3].update(answer=None), "sums/test/3 (answer: "),
    ("values", lambda train, test: test[3].update(id=""), "test.jsonl:4 (id: "),
    ("unique_ids", lambda train, test: train[3].update(id="sums/train/4"), "sums/train/4 (train.jsonl:4) and 1 more"),
    ("unique_ids", lambda train, test: train[3].update(id="sums/test/4"), "sums/test/4 (train.jsonl:4) and 1 more"),
    ("splits", lambda train, test: test[3].update(split="train"), "sums/test/3"),
    ("gradable_answers", lambda train, test: train[3].update(answer="99"), "sums/train/3 (answer 99, graded wrong)"),
    (
        "gradable_answers",
        lambda train, test: train[3].update(solution="it is 7"),
        "sums/train/3 (answer 7, graded wrong)",
    ),
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
    """The one line names the expectation and the row; the outputs are kept and say the same."""
    spoil(problems, how)
    with pytest.raises(DataRejectedError) as error:
        run(problems, tmp_path / "validation")
    assert message in str(error.value)
    assert f"`{name}`" in str(error.value)
    assert "\n" not in str(error.value)
    assert name in missed(tmp_path / "validation")
    assert jsonl.read_json(tmp_path / "validation/result.json")["success"] is False
    assert "The problems are rejected" in (tmp_path / "validation/report.html").read_text(encoding="utf-8")


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
    """What is not critical is counted, said in the log, and does not stop the pipeline."""
    spoil(problems, how)
    metrics = run(problems, tmp_path / "validation")
    assert missed(tmp_path / "validation") == {name}
    assert outcome(tmp_path / "validation", name)["unexpected"] == unexpected
    assert metrics["missed_warning"] + metrics["missed_info"] == 1
    assert f"`{name}` is not met" in capsys.readouterr().out


def test_a_share_of_long_prompts_is_allowed(problems: Path, tmp_path: Path) -> None:
    """As many prompts as the config allows may be longer than the limit; they are counted all the same."""
    spoil(problems, lambda train, test: train[0].update(question="?" * 100))
    run(problems, tmp_path / "validation")
    found = outcome(tmp_path / "validation", "prompt_length")
    assert (found["success"], found["checked"], found["unexpected"]) == (True, 30, 1)


def test_several_critical_expectations_are_all_named(problems: Path, tmp_path: Path) -> None:
    """The first is explained and the others are named, in one line."""
    spoil(problems, lambda train, test: [train[3].update(split="test"), train[4].update(answer="99")])
    with pytest.raises(DataRejectedError, match=r"`splits` .* also not met: gradable_answers"):
        run(problems, tmp_path / "validation")


def test_problems_none_of_which_is_well_formed_are_rejected(problems: Path, tmp_path: Path) -> None:
    """Expectations with nothing to look at neither crash nor hide that the data are bad."""
    spoil(problems, lambda train, test: [row.pop(name) for row in [*train, *test] for name in list(row)])
    with pytest.raises(DataRejectedError, match=r"train\.jsonl:1 .* and 27 more"):
        run(problems, tmp_path / "validation")


def test_a_check_that_breaks_is_no_verdict_on_the_data(problems: Path) -> None:
    """A rule that cannot be evaluated is reported as broken, and the data are not called bad."""
    frame = derive(read(problems), validated(ValidateConfig, PARAMS, name=""))
    rule = Rule("ExpectColumnSumToBeBetween", "row", {"min_value": 1})
    with pytest.raises(PipelineError, match="`broken` could not be checked") as error:
        suite.run(frame, [Expectation("broken", "Labels are numbers", Severity.CRITICAL, rule)])
    assert not error.value.keeps_outputs


@pytest.mark.parametrize("content", [b'{"id": ', b"\xff\xfe"])
def test_a_file_that_is_no_json_lines_is_named_with_its_line(problems: Path, tmp_path: Path, content: bytes) -> None:
    """A truncated or binary file is an error, not bad data."""
    path = problems / "train.jsonl"
    path.write_bytes(path.read_bytes() + content)
    with pytest.raises(PipelineError, match=r"train\.jsonl:21") as error:
        run(problems, tmp_path / "validation")
    assert not error.value.keeps_outputs


def test_equal_problems_give_equal_bytes(problems: Path, tmp_path: Path) -> None:
    """Result and page hold no time and no run id."""
    for name in ("first", "second"):
        run(problems, tmp_path / name)
    assert lineage.digest(tmp_path / "first") == lineage.digest(tmp_path / "second")


def test_the_page_needs_nothing_else(problems: Path, tmp_path: Path) -> None:
    """It is one file, and markup in the problems stays text."""
    spoil(problems, lambda train, test: train[0].update(question="<script>1 < 2</script> What is 0 + 1?"))
    run(problems, tmp_path / "validation")
    page = (tmp_path / "validation/report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;1 &lt; 2&lt;/script&gt; What is 0 + 1?" in page
    for forbidden in ("http:", "https:", "<script", "<link", "@import", "url("):
        assert forbidden not in page


@pytest.mark.slow
def test_the_command_rejects_quietly_where_nothing_can_be_written_at_home(problems: Path, tmp_path: Path) -> None:
    """One line on standard error, exit code 2, outputs in place, no heavy library loaded, no home folder needed."""
    spoil(problems, lambda train, test: train[3].update(answer="99"))
    params, validation = tmp_path / "params.yaml", tmp_path / "validation"
    params.write_text(yaml.safe_dump({"validate_data": PARAMS}))
    command = [
        *("-m", "components.validate_data", "--params", str(params)),
        *("--problems", str(problems), "--validation", str(validation)),
    ]
    done = subprocess.run(
        [sys.executable, "-W", "default", *command],
        env={**os.environ, "HOME": "/proc/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: validate_data: `gradable_answers` is not met (the grader finds that each solution ends in its answer): "
        "sums/train/3 (answer 99, graded wrong); report.html has the details"
    ]
    assert {path.name for path in validation.iterdir()} == {"result.json", "report.html", "lineage.json"}


@pytest.mark.slow
def test_neither_torch_nor_transformers_is_loaded(problems: Path, tmp_path: Path) -> None:
    """Validation runs in the light image."""
    code = (
        "import json, sys; from pathlib import Path; from components.validate_data.validate import validate; "
        "from components.validate_data.config import ValidateConfig; "
        "config = ValidateConfig(**json.loads(sys.argv[1])); "
        "validate(config, problems=Path(sys.argv[2]), validation=Path(sys.argv[3])); "
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(PARAMS), problems, tmp_path], check=True)
