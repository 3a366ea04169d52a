"""The stage as a whole: what its folder holds, what makes it fail, and that equal inputs give equal bytes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.prepare_data.config import PrepareConfig
from components.prepare_data.prepare import prepare
from components.shared.errors import PipelineError
from components.shared.lineage import file_digest
from components.shared.problem import Split, read_problems

_DATA = Path("../shared/data")
_ROOT = Path(__file__).parents[2]
_WORDS: dict[str, Any] = {
    "kind": "word_problems",
    "num_train": 40,
    "num_test": 10,
    "worked_fraction": 0.5,
    "families": ["total", "gains_and_losses"],
    "min_operands": 3,
    "max_operands": 4,
}
_FILES = ["contamination.json", "manifest.json", "quarantine.jsonl", "test.jsonl", "train.jsonl"]


def _gsm8k(number: int) -> bytes:
    return json.dumps({"question": f"What is {number} plus 1?", "answer": f"#### {number + 1:,}"}).encode()


def _write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def _section(*sources: dict[str, Any], max_malformed_fraction: float = 0.0) -> dict[str, Any]:
    return {
        "seed": 1,
        "sources": list(sources),
        "max_malformed_fraction": max_malformed_fraction,
        "contamination": {"ngram_words": 13, "max_overlap": 0.5},
    }


def _prepare(folder: Path, *sources: dict[str, Any], max_malformed_fraction: float = 0.0) -> dict[str, float]:
    folder.mkdir()
    section = _section(*sources, max_malformed_fraction=max_malformed_fraction)
    return prepare(PrepareConfig.model_validate(section), problems=folder)


@pytest.fixture
def gsm8k(tmp_path: Path) -> dict[str, Any]:
    """Twenty train and five test rows; train row 3 is test row 1 in capitals."""
    train = [_gsm8k(number) for number in range(20)]
    train[3] = _gsm8k(1001).replace(b"What is", b"WHAT IS")
    test = [_gsm8k(number) for number in range(1000, 1005)]
    return {
        "kind": "gsm8k",
        "train": str(_write(tmp_path / "train.jsonl", train)),
        "test": str(_write(tmp_path / "test.jsonl", test)),
    }


def test_the_folder_holds_problems_and_an_account_of_them(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """Sources follow one another in the config's order; the manifest counts what is there and what is not."""
    metrics = _prepare(tmp_path / "out", gsm8k, _WORDS)
    assert metrics == {"num_train": 59, "num_test": 15, "num_contaminated": 1, "num_quarantined": 0}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == _FILES
    train = read_problems(tmp_path / "out", Split.TRAIN)
    assert [problem.id for problem in train[:4]] == [f"gsm8k/train/0000{index}" for index in (0, 1, 2, 4)]
    assert [problem.source for problem in train] == ["gsm8k"] * 19 + ["word_problems"] * 40
    assert read_problems(tmp_path / "out", Split.TEST)[1].answer == "1002"
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["splits"] == {
        split: {
            "problems": sum(sources.values()),
            "sha256": file_digest(tmp_path / f"out/{split}.jsonl"),
            "sources": sources,
        }
        for split, sources in {
            "train": {"gsm8k": 19, "word_problems": 40},
            "test": {"gsm8k": 5, "word_problems": 10},
        }.items()
    }
    assert (manifest["removed_as_contaminated"], manifest["quarantined"]) == (1, 0)
    assert [(file["path"], file["sha256"], file["rows"]) for file in manifest["raw_files"]] == [
        (gsm8k["train"], file_digest(Path(gsm8k["train"])), 20),
        (gsm8k["test"], file_digest(Path(gsm8k["test"])), 5),
    ]


def test_a_train_problem_that_is_in_the_test_split_is_removed_and_reported(
    tmp_path: Path, gsm8k: dict[str, Any]
) -> None:
    """The report names both problems and how they match."""
    _prepare(tmp_path / "out", gsm8k)
    assert json.loads((tmp_path / "out/contamination.json").read_text()) == {
        "ngram_words": 13,
        "max_overlap": 0.5,
        "removed": 1,
        "by_match": {"normalised": 1},
        "problems": [{"train": "gsm8k/train/00003", "test": "gsm8k/test/00001", "match": "normalised", "overlap": 1.0}],
    }
    assert "gsm8k/train/00003" not in (tmp_path / "out/train.jsonl").read_text()


def test_a_train_problem_is_compared_with_the_tests_of_every_source(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """A test problem of one dataset that hides in the train split of another is found too."""
    row = {"problem": "What is 7 plus 1?", "solution": "", "answer": "8", "level": 1, "subject": "Algebra"}
    row["solution"] = r"It is $\boxed{8}$."
    math500 = {"kind": "math500", "test": str(_write(tmp_path / "m.jsonl", [json.dumps(row).encode()]))}
    assert _prepare(tmp_path / "out", gsm8k, math500)["num_contaminated"] == 2


def test_malformed_rows_are_set_aside_with_file_line_and_reason(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """Up to the limit they cost nothing but themselves, and ids of the others stay what they were."""
    lines = [_gsm8k(number) for number in range(10)]
    lines[2:5] = [b'{"question": "cut o', b'{"question": "caf\xe9", "answer": "#### 1"}', b'{"question": "no answer"}']
    path = _write(tmp_path / "bad.jsonl", lines)
    metrics = _prepare(tmp_path / "out", gsm8k | {"train": str(path)}, max_malformed_fraction=0.3)
    assert (metrics["num_train"], metrics["num_quarantined"]) == (7, 3)
    quarantine = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in quarantine] == [(str(path), 3), (str(path), 4), (str(path), 5)]
    assert quarantine[1]["reason"] == "not UTF-8 text (byte 17 of the line)"
    assert quarantine[2]["reason"] == "column `answer` is missing"
    assert [problem.id[-1] for problem in read_problems(tmp_path / "out", Split.TRAIN)] == list("0156789")


def test_more_malformed_rows_than_allowed_are_an_error(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """The line says how many, of how many, in which file, and shows the first; each file is judged alone."""
    test = _write(tmp_path / "bad.jsonl", [_gsm8k(1), b"{}", b"{}", _gsm8k(2)])
    with pytest.raises(PipelineError) as refused:
        _prepare(tmp_path / "out", gsm8k | {"test": str(test)}, max_malformed_fraction=0.49)
    assert str(refused.value) == (
        f"{test}: 2 of 4 rows are malformed, more than prepare_data.max_malformed_fraction (0.49) allows; "
        f"first: {test}:2: column `answer` is missing"
    )


@pytest.mark.parametrize(("content", "message"), [(b"", "contains no row"), (b"{}\n{}\n", "2 of 2 rows are")])
def test_a_file_without_a_usable_row_is_an_error(
    tmp_path: Path, gsm8k: dict[str, Any], content: bytes, message: str
) -> None:
    """No limit lets an empty or wholly malformed file pass."""
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(PipelineError, match=message):
        _prepare(tmp_path / "out", gsm8k | {"train": str(tmp_path / "bad.jsonl")}, max_malformed_fraction=0.99)


def test_a_missing_file_says_how_to_get_it(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """The message names the file and the command."""
    with pytest.raises(PipelineError, match=r"nowhere\.jsonl: no such file; `make data` fetches"):
        _prepare(tmp_path / "out", gsm8k | {"train": str(tmp_path / "nowhere.jsonl")})


@pytest.mark.parametrize("missing", ["train", "test"])
def test_a_split_without_problems_is_an_error(tmp_path: Path, gsm8k: dict[str, Any], missing: str) -> None:
    """There is nothing to learn from, or nothing to measure with."""
    with pytest.raises(PipelineError, match=f"prepare_data.sources: no source has a {missing} problem"):
        _prepare(tmp_path / "out", {name: value for name, value in gsm8k.items() if name != missing})


def test_limits_take_the_beginning_of_a_split(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """A quick run reads no more than it needs, and the manifest says how much that was."""
    metrics = _prepare(tmp_path / "out", gsm8k | {"train_limit": 3, "test_limit": 2})
    assert (metrics["num_train"], metrics["num_test"]) == (3, 2)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert [file["rows"] for file in manifest["raw_files"]] == [3, 2]


def test_math_folders_become_problems(tmp_path: Path) -> None:
    """Ids hold subject and file name, and a file that is no problem is quarantined under its own name."""
    row = {"problem": "What is $1+1$?", "level": "Level ?", "type": "Algebra", "solution": r"$\boxed{2}$"}
    for name in ("train/algebra/2", "train/algebra/10", "train/geometry/1", "test/algebra/3"):
        path = tmp_path / "MATH" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row | {"problem": f"What is {name}?"}), encoding="utf-8")
    (tmp_path / "MATH/train/geometry/1.json").write_text("{}")
    math = {"kind": "math", "train": str(tmp_path / "MATH/train"), "test": str(tmp_path / "MATH/test")}
    _prepare(tmp_path / "out", math, max_malformed_fraction=0.5)
    train = read_problems(tmp_path / "out", Split.TRAIN)
    assert [(problem.id, problem.answer, problem.level) for problem in train] == [
        ("math/train/algebra/2", "2", None),
        ("math/train/algebra/10", "2", None),
    ]
    quarantined = json.loads((tmp_path / "out/quarantine.jsonl").read_text())
    assert (Path(quarantined["file"]).name, quarantined["line"]) == ("1.json", 1)


@pytest.mark.skipif(not _DATA.is_dir(), reason="the published files are not at hand")
def test_the_published_files_are_read_whole(tmp_path: Path) -> None:
    """No row of GSM8K or MATH-500 is malformed; two train problems tell a test problem's story again."""
    gsm8k = {"kind": "gsm8k", "train": str(_DATA / "gsm8k_train.jsonl"), "test": str(_DATA / "gsm8k_test.jsonl")}
    metrics = _prepare(tmp_path / "out", gsm8k, {"kind": "math500", "test": str(_DATA / "math500.jsonl")})
    assert metrics == {"num_train": 7471, "num_test": 1819, "num_contaminated": 2, "num_quarantined": 0}
    test = read_problems(tmp_path / "out", Split.TEST)
    assert {problem.level for problem in test if problem.source == "math500"} == {1, 2, 3, 4, 5}
    assert len({problem.subject for problem in test if problem.source == "math500"}) == 7


def _run(folder: Path, section: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "params.yaml").write_text(yaml.safe_dump({"prepare_data": section}), encoding="utf-8")
    command = [sys.executable, "-m", "components.prepare_data"]
    options = ["--params", str(folder / "params.yaml"), "--problems", str(folder / "problems")]
    return subprocess.run([*command, *options], cwd=_ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_two_runs_of_the_stage_give_equal_bytes(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """Run as a program, whatever the hash seed: the same files, lineage included, to the byte."""
    runs = []
    for name in ("one", "two"):
        done = _run(tmp_path / name, _section(gsm8k, _WORDS))
        assert done.returncode == 0, done.stderr
        assert "59 train and 15 test problems (left out: 1 contaminated, 0 malformed)" in done.stdout
        runs.append({path.name: path.read_bytes() for path in (tmp_path / name / "problems").iterdir()})
    assert sorted(runs[0]) == sorted([*_FILES, "lineage.json"])
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_a_failed_run_leaves_one_line_and_nothing_else(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """Exit code 2, the reason on standard error, and no folder that could be taken for a result."""
    done = _run(tmp_path / "run", _section(gsm8k | {"train": "no/such/file.jsonl"}))
    assert done.returncode == 2
    assert done.stderr.startswith("error: prepare_data: no/such/file.jsonl: no such file; `make data`")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run/problems").exists()


@pytest.mark.slow
def test_the_stage_stays_light() -> None:
    """Preparing data loads neither torch nor transformers."""
    script = (
        "import sys, components.prepare_data.prepare, components.prepare_data.fetch; "
        "print({'torch', 'transformers', 'dvc', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
