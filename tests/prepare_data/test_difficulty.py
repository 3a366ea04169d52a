from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components.prepare_data.config import PrepareConfig
from components.prepare_data.difficulty import question_digest
from components.prepare_data.prepare import STAGE, prepare
from components.shared import jsonl, stage
from components.shared.errors import PipelineError
from components.shared.lineage import file_digest, read
from components.shared.problem import Problem, Split, read_problems

_HOW = {"model": "small", "digest": "d1", "temperature": 1.0, "max_new_tokens": 32}
_WORDS = {"kind": "word_problems", "num_train": 6, "num_test": 3, "min_operands": 3, "max_operands": 4}


def _config(**difficulty: Any) -> PrepareConfig:
    return PrepareConfig.model_validate({"sources": [_WORDS], **({"difficulty": difficulty} if difficulty else {})})


def _rates(path: Path, problems: list[Problem], right: list[int]) -> dict[str, Any]:
    """Write that of ten completions to each of these problems so many were right; return the key."""
    pairs = zip(problems, right, strict=False)
    rows = [{"question": question_digest(each), "right": number, "samples": 10} for each, number in pairs]
    jsonl.write_rows(path, [_HOW, *rows])
    return {"pass_rates": path}


@pytest.fixture
def problems(tmp_path: Path) -> list[Problem]:
    """The train problems without a choice."""
    (tmp_path / "all").mkdir()
    prepare(_config(), problems=tmp_path / "all")
    return read_problems(tmp_path / "all", Split.TRAIN)


def test_problems_within_the_band_are_kept(tmp_path: Path, problems: list[Problem]) -> None:
    """Both ends belong to it; what has no rate is left out, and all of it is recorded."""
    rates = _rates(tmp_path / "rates.jsonl", problems, [0, 1, 9, 10, 5])
    stage.run(STAGE, _config(**rates), {"problems": tmp_path / "out"})
    kept = read_problems(tmp_path / "out", Split.TRAIN)
    assert kept == [problems[1], problems[2], problems[4]]
    assert read_problems(tmp_path / "out", Split.TEST) == read_problems(tmp_path / "all", Split.TEST)
    counts = {"kept": 3, "too_easy": 1, "too_hard": 1, "unmeasured": 1, "rates": 5}
    assert jsonl.read_json(tmp_path / "out/manifest.json")["difficulty"] == {"measured": _HOW, **counts}
    made_by = read(tmp_path / "out")
    assert made_by is not None
    path = tmp_path / "rates.jsonl"
    assert made_by.work.materials[str(path)].sha256 == file_digest(path)


def test_a_band_that_keeps_nothing_is_refused(tmp_path: Path, problems: list[Problem]) -> None:
    """The error counts the problems by reason. Reversed limits, and a file with a wrong line, are refused as well."""
    rates = _rates(tmp_path / "rates.jsonl", problems, [0, 0, 0, 10])
    with pytest.raises(PipelineError, match="keeps none of 6 train problems: 1 are too easy, 3 too hard, 2 have no"):
        prepare(_config(**rates), problems=tmp_path)
    with pytest.raises(ValidationError, match="min_pass_rate is above max_pass_rate"):
        _config(**rates, min_pass_rate=0.5, max_pass_rate=0.4)
    jsonl.write_rows(tmp_path / "rates.jsonl", [_HOW, {"question": "a", "right": -1, "samples": 2}])
    with pytest.raises(PipelineError, match=r"rates\.jsonl:2\.right: should be at least 0"):
        prepare(_config(**rates), problems=tmp_path)
