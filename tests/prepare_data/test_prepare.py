import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.prepare_data.config import PrepareConfig
from components.prepare_data.prepare import STAGE, prepare
from components.shared import stage
from components.shared.answer_policy import AnswerPolicy
from components.shared.config import validate
from components.shared.errors import PipelineError
from components.shared.lineage import Material, file_digest, read
from components.shared.problem import Split, read_problems
from components.validate_data.gradable import grades

_DATA = Path("../shared/data")
_WORDS = {"kind": "word_problems", "num_train": 40, "num_test": 10, "min_operands": 3, "max_operands": 4}
_FROM_GIT = {"repository": {"url": "data", "commit": "0" * 40}}
_FILES = ["contamination.json", "manifest.json", "quarantine.jsonl", "test.jsonl", "train.jsonl"]


def _gsm8k(number: int) -> bytes:
    return json.dumps({"question": f"What is {number} plus 1?", "answer": f"#### {number + 1:,}"}).encode()


def _write(path: Path, lines: list[bytes]) -> str:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def _prepare(folder: Path, *sources: dict[str, Any], max_malformed_fraction: float = 0.0) -> dict[str, float]:
    folder.mkdir()
    section = {"sources": sources, "max_malformed_fraction": max_malformed_fraction}
    return prepare(PrepareConfig.model_validate(section), problems=folder)


@pytest.fixture
def gsm8k(tmp_path: Path) -> dict[str, Any]:
    """Twenty train and five test rows; train row 3 is test row 1 in capitals."""
    train = [_gsm8k(number) for number in range(20)]
    train[3] = _gsm8k(1001).replace(b"What is", b"WHAT IS")
    test = [_gsm8k(number) for number in range(1000, 1005)]
    return {
        "kind": "gsm8k",
        "train": _write(tmp_path / "train.jsonl", train),
        "test": _write(tmp_path / "test.jsonl", test),
    }


def test_part_of_the_train_file_is_held_out_for_tuning(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """What dev asks in other letters, train does not ask, and what test asks, dev does not; test stays as it is."""
    rows = Path(gsm8k["train"]).read_bytes().splitlines()
    _write(Path(gsm8k["train"]), [*rows, *(row.replace(b"What is", b"WHAT IS") for row in rows)])
    figures = _prepare(tmp_path / "out", gsm8k | {"dev_fraction": 0.4})
    _prepare(tmp_path / "plain", gsm8k)
    dev, train, test = (read_problems(tmp_path / "out", split) for split in (Split.DEV, Split.TRAIN, Split.TEST))
    assert (figures["num_dev"], figures["num_train"]) == (len(dev), len(train))
    assert len(dev) > 2
    plain = read_problems(tmp_path / "plain", Split.TRAIN)
    assert {each.answer for each in [*dev, *train]} == {each.answer for each in plain}
    asked = [{each.question.casefold() for each in members} for members in (dev, train, test)]
    assert not asked[0] & asked[1]
    assert not asked[2] & (asked[0] | asked[1])
    assert test == read_problems(tmp_path / "plain", Split.TEST)
    assert not (tmp_path / "plain" / "dev.jsonl").exists()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sources": [{"kind": "gsm9k"}]}, "sources.0.kind: unknown kind `gsm9k`; did you mean `gsm8k`?"),
        ({"sources": [_WORDS, _WORDS]}, "prepare_data.sources: `word_problems` occurs twice"),
        ({"sources": [_WORDS | {"min_operands": 5}]}, "max_operands must not be below min_operands (prepare_data"),
        ({"sources": [_WORDS | {"num_train": 0, "num_test": 0}]}, "num_train and num_test must not both be 0"),
        (_FROM_GIT | {"sources": [{"kind": "gsm8k", "train": "/data/train.jsonl"}]}, "not in the repository"),
        ({"repository": {"url": "data", "commit": "v1"}, "sources": [_WORDS]}, "give what `git rev-parse v1` prints"),
    ],
)
def test_invalid_section_is_refused_in_one_line(section: dict[str, Any], message: str) -> None:
    """The key is named together with what would be accepted."""
    with pytest.raises(PipelineError) as refused:
        validate(PrepareConfig, section, name="prepare_data")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_output_has_the_problems_and_what_was_left_out(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """Sources follow one another in the config's order; test problems of any source count as contamination."""
    row = {"problem": "What is 7 plus 1?", "solution": "8", "answer": "8", "level": 1, "subject": "Algebra"}
    math500 = {"kind": "math500", "test": _write(tmp_path / "m.jsonl", [json.dumps(row).encode()])}
    metrics = _prepare(tmp_path / "out", gsm8k, math500, _WORDS)
    assert metrics == {"num_train": 58, "num_test": 16, "num_contaminated": 2, "num_quarantined": 0}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == _FILES
    train = read_problems(tmp_path / "out", Split.TRAIN)
    assert [problem.id for problem in train[:4]] == [f"gsm8k/train/0000{index}" for index in (0, 1, 2, 4)]
    assert read_problems(tmp_path / "out", Split.TEST)[1].answer == "1002"
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    sources = {"train": {"gsm8k": 18, "word_problems": 40}, "test": {"gsm8k": 5, "math500": 1, "word_problems": 10}}
    digests = {split: file_digest(tmp_path / f"out/{split}.jsonl") for split in sources}
    assert manifest["splits"] == {
        split: {"problems": sum(counts.values()), "sha256": digests[split], "sources": counts}
        for split, counts in sources.items()
    }
    assert (manifest["removed_as_contaminated"], manifest["quarantined"]) == (2, 0)
    digest = file_digest(Path(gsm8k["train"]))
    expected = {"path": gsm8k["train"], "source": "gsm8k", "split": "train", "sha256": digest, "rows": 20}
    assert manifest["raw_files"][0].items() >= expected.items()
    assert [file["path"] for file in manifest["raw_files"][1:]] == [gsm8k["test"], math500["test"]]
    overlap = {"match": "normalised", "overlap": 1.0}
    assert json.loads((tmp_path / "out/contamination.json").read_text()) == {
        **{"ngram_words": 13, "max_overlap": 0.5, "removed": 2, "by_match": {"exact": 1, "normalised": 1}},
        "problems": [
            {"train": "gsm8k/train/00003", "test": "gsm8k/test/00001", **overlap},
            {"train": "gsm8k/train/00007", "test": "math500/test/00000", **overlap, "match": "exact"},
        ],
    }


def test_lineage_names_the_bytes_of_raw_files(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """Size, SHA-256 and, where the file is what its DVC pointer says, the MD5 in the pointer."""
    md5 = hashlib.md5(Path(gsm8k["train"]).read_bytes(), usedforsecurity=False).hexdigest()
    for split, pointed in (("train", md5), ("test", "0" * 32)):
        Path(f"{gsm8k[split]}.dvc").write_text(yaml.safe_dump({"outs": [{"md5": pointed, "path": "x"}]}))
    config = PrepareConfig.model_validate({"sources": [gsm8k, _WORDS]})
    stage.run(STAGE, config, {"problems": tmp_path / "out"})
    made_by = read(tmp_path / "out")
    assert made_by
    assert made_by.work.materials == {
        gsm8k[split]: Material(
            sha256=file_digest(Path(gsm8k[split])), size_bytes=Path(gsm8k[split]).stat().st_size, dvc_md5=known
        )
        for split, known in (("test", None), ("train", md5))
    }


def test_malformed_rows_are_quarantined(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """With file, line and reason; up to the limit the others are used. Ids and lines count empty lines, too."""
    lines = [_gsm8k(number) for number in range(10)]
    lines[2:5] = [b'{"question": "cut o', b'{"question": "caf\xe9", "answer": "#### 1"}', b'{"question": "no answer"}']
    lines[1] = b""
    path = _write(tmp_path / "bad.jsonl", lines)
    metrics = _prepare(tmp_path / "out", gsm8k | {"train": path}, max_malformed_fraction=0.34)
    assert (metrics["num_train"], metrics["num_quarantined"]) == (6, 3)
    quarantine = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in quarantine] == [(path, 3), (path, 4), (path, 5)]
    assert quarantine[1]["reason"] == "not UTF-8 text (byte 17 of the line)"
    assert quarantine[2]["reason"] == "column `answer` is missing"
    assert [problem.id[-1] for problem in read_problems(tmp_path / "out", Split.TRAIN)] == list("056789")


def test_file_with_too_few_usable_rows_is_an_error(tmp_path: Path, gsm8k: dict[str, Any]) -> None:
    """Each file is judged alone, with its held-out rows; no limit lets an empty or entirely malformed one pass."""
    few = _write(tmp_path / "few.jsonl", [_gsm8k(1), b"{}", b"{}", _gsm8k(2)])
    allowed = rf"{few}: 2 of 4 rows are malformed, .*\(0.49\) allows; .* set it to 0.5 or more; first: {few}:2: column"
    with pytest.raises(PipelineError, match=allowed):
        _prepare(tmp_path / "few", gsm8k | {"train": few, "dev_fraction": 0.99}, max_malformed_fraction=0.49)
    empty = _write(tmp_path / "empty.jsonl", [])
    with pytest.raises(PipelineError, match=f"{empty}: contains no row"):
        _prepare(tmp_path / "empty", gsm8k | {"test": empty}, max_malformed_fraction=0.99)
    same = _write(tmp_path / "same.jsonl", [_gsm8k(1)] * 20)
    with pytest.raises(PipelineError, match="contains no row for the test split; rows with the same question stay in"):
        _prepare(tmp_path / "same", {"kind": "gsm8k", "train": same, "test_fraction": 0.001})
    for missing in ("train", "test"):
        with pytest.raises(PipelineError, match=f"prepare_data.sources: no source has a {missing} problem"):
            _prepare(tmp_path / missing, {name: value for name, value in gsm8k.items() if name != missing})


@pytest.mark.skipif(not _DATA.is_dir(), reason="the published files are not here")
def test_published_files_are_read_completely(tmp_path: Path) -> None:
    """No row of GSM8K or MATH-500 is malformed or cannot be graded; two train problems tell a test problem's story."""
    gsm8k = {"kind": "gsm8k", "train": str(_DATA / "gsm8k_train.jsonl"), "test": str(_DATA / "gsm8k_test.jsonl")}
    metrics = _prepare(tmp_path / "out", gsm8k, {"kind": "math500", "test": str(_DATA / "math500.jsonl")})
    assert metrics == {"num_train": 7471, "num_test": 1819, "num_contaminated": 2, "num_quarantined": 0}
    contamination = json.loads((tmp_path / "out/contamination.json").read_text())
    found = [(each["train"], each["test"], each["match"]) for each in contamination["problems"]]
    assert found == [(f"gsm8k/train/{train}", "gsm8k/test/00602", "ngrams") for train in ("01314", "05162")]
    problems = read_problems(tmp_path / "out", Split.TEST)
    assert set(grades(problems, AnswerPolicy.BOXED, imitated=False)) == {"right"}
