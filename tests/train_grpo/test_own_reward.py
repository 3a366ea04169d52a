from pathlib import Path

import pytest

from components.shared.errors import PipelineError
from components.train_grpo.own_reward import load


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in a package of the user's."""
    package = tmp_path / f"package_{tmp_path.name}"
    package.mkdir()
    (package / "rewards.py").write_text("def half(problem, completion, grade):\n    return 0.5\n\nlimit = 3\n")
    (package / "broken.py").write_text("import a_library_that_is_not_there\n")
    (package / "exiting.py").write_text("raise RuntimeError('no licence')\n")
    (package / "leaving.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return package.name


def test_the_function_that_is_named_is_the_reward(module: str) -> None:
    """In whatever package it is."""
    assert load(f"{module}.rewards:half")(None, None, None) == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.rewards:half", r"cannot be imported \(ModuleNotFoundError: No module named .*in PYTHONPATH"),
        ("{}.broken:half", r"cannot be imported \(ModuleNotFoundError: No module named 'a_library_that_is_not_there'"),
        ("{}.exiting:half", r"cannot be imported \(RuntimeError: no licence\)"),
        ("{}.leaving:half", r"cannot be imported \(SystemExit: 0\)"),
        ("{}.rewards:third", r"rewards\.py\) has no function `third`"),
        ("{}.rewards:limit", r"rewards\.py\) has no function `limit`, but 3"),
    ],
)
def test_what_is_no_function_is_refused(module: str, name: str, message: str) -> None:
    """The message names the key, and the module or the file."""
    named = name.format(module)
    with pytest.raises(PipelineError, match=message) as error:
        load(named)
    assert str(error.value).startswith(f"train_grpo.reward.weights.{named}: ")
