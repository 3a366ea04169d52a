"""`grpo-pipeline evaluate`: raw files and a folder with a model in, records, scores and a table out."""

from pathlib import Path

import pytest

from components.evaluate.protocols import PROTOCOLS
from components.policy import checkpoint as checkpoints
from components.shared import jsonl
from components.shared.problem import Split, write_problems
from pipelines.cli import main
from tests import tiny
from tests.presets import ROOT

OPTIONS = ["--protocol", "gsm8k-deepseekmath", "--samples", "2", "--max-new-tokens", "6", "--max-batch-size", "2"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An untrained model as a stage saves it, in the working folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny-model"
    checkpoints.save(tiny.checkpoint(), folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Raw files in GSM8K's form, with a row that cannot be used."""
    folder = tmp_path / "raw"
    (folder / "MATH/test").mkdir(parents=True)
    rows = [{"question": each.question, "answer": each.solution} for each in tiny.PROBLEMS]
    jsonl.write_rows(folder / "gsm8k_test.jsonl", [*rows[:10], {"question": "Why?", "answer": "No number."}])
    jsonl.write_rows(folder / "gsm8k_train.jsonl", rows[10:])
    jsonl.write_rows(folder / "MATH/test/1.jsonl", [{}])
    return folder


def test_every_protocol_is_listed_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """A line each, and a row of the table with its tokens."""
    assert main(["evaluate", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PROTOCOLS)
    page = (ROOT / "docs/how-to/evaluation.md").read_text()
    for name, protocol in PROTOCOLS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert row.endswith(f"| {protocol.max_new_tokens:,} |")


def test_a_folder_is_measured_by_several_protocols(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of the table and a folder for each; a subset is part of it."""
    own = tmp_path / "own.jsonl"
    jsonl.write_rows(own, [{"question": "1+1?", "solution": "1+1=2\n#### 2"}])
    options = ["evaluate", str(model), "--data", str(data), *OPTIONS]
    assert main([*options, "--protocol", "gsm8k-8shot", "--examples", str(own)]) == 0
    out = capsys.readouterr().out
    assert f"{data / 'gsm8k_test.jsonl'}:11: is left out: column `answer` has no `####`" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("gsm8k-")]
    assert [(name, source, number) for name, source, number, *_ in rows] == [
        ("gsm8k-deepseekmath", "gsm8k", "10"),
        ("gsm8k-8shot", "gsm8k", "10"),
    ]
    folder = tmp_path / "outputs/evaluations/tiny-model"
    facts = jsonl.read_json(folder / "gsm8k-8shot/scores.json")["protocol"]
    assert facts["prompt"] == "Question: 1+1?\nAnswer: 1+1=2\n#### 2\n\nQuestion: {question}\nAnswer:"
    assert main([*options, "--limit", "4", "--samples", "0", "--output", "few"]) == 0
    whole, few = (
        (place / "gsm8k-deepseekmath/records.jsonl").read_text().splitlines() for place in (folder, tmp_path / "few")
    )
    assert len(few) == 4
    assert [row for row in whole if row in few] == few


def test_problems_of_a_run_are_asked_as_in_training(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them by the model's own protocol; a named one asks those of its dataset."""
    sources = enumerate(["gsm8k", "sums", "gsm8k"])
    write_problems(tmp_path, Split.TEST, [tiny.problem(n, split=Split.TEST, source=name) for n, name in sources])
    options = ["evaluate", str(model), "--data", str(tmp_path), "--max-new-tokens", "4"]
    assert main([*options, "--protocol", "pipeline", "--protocol", "gsm8k-deepseekmath"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if line.startswith(("pipe", "gsm8k-"))]
    assert rows == [["pipeline", "gsm8k", "2"], ["pipeline", "sums", "1"], ["gsm8k-deepseekmath", "gsm8k", "2"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a MODEL and a --protocol"),
        (["{model}", "--protocol", "gsm9k"], "--protocol gsm9k: no such protocol; there are pipeline, gsm8k-chat"),
        (["{model}", "--protocol", "math500-chat"], "/raw/math500.jsonl: no such file; `make data` fetches GSM8K, MA"),
        (["{model}", "--protocol", "math-deepseekmath"], "/raw/MATH/test: holds no problem"),
        (["{model}", "--protocol", "pipeline"], "give --data the folder `problems` that prepare_data has written"),
        (["org/name", "--protocol", "gsm8k-chat"], "org/name: neither a folder nor a model that can be fetched"),
        (["{model}", "--protocol", "gsm8k-8shot", "--examples", "none.jsonl"], "none.jsonl: no such file"),
        (["{model}", "--protocol", "gsm8k-8shot", "--examples", "raw/MATH/test/1.jsonl"], "MATH/test/1.jsonl:1: expec"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Before the weights are read: they are damaged."""
    (model / "model.safetensors").write_bytes(b"")
    filled = [each.format(model=model) for each in arguments]
    assert main(["evaluate", *filled, "--data", str(data)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not Path("outputs").exists()
