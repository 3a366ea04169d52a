"""The code that a params file names, found without importing it."""

from pathlib import Path

import pytest

from components.shared.custom_code import code_file


def test_a_module_is_found_below_folders_without_an_init_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep: nothing of it is imported yet."""
    module = tmp_path / "work_in/deep/rewards.py"
    module.parent.mkdir(parents=True)
    module.write_text("raise ValueError('imported')\n")
    monkeypatch.chdir(tmp_path)
    assert code_file("work_in.deep.rewards:brevity") == module
    assert code_file("work_in.deep.others:brevity") is None
