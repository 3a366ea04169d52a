from pathlib import Path

import pytest

from components.shared.errors import PipelineError
from components.shared.problem import Split, problems_file, read_problems


def test_a_split_without_problems_is_an_error(tmp_path: Path) -> None:
    """Training on nothing would succeed."""
    problems_file(tmp_path, Split.TRAIN).touch()
    with pytest.raises(PipelineError, match=r"train\.jsonl: holds no problem$"):
        read_problems(tmp_path, Split.TRAIN)
