import re
from pathlib import Path

import pytest
import yaml

from components.environments.environment import Observation
from components.environments.pool import Environments
from components.environments.worker import BUILT_IN
from components.shared.model import ModelConfig
from components.shared.tools import ARGUMENTS
from tests import tiny

PAGE = (Path(__file__).parents[2] / "docs/reference/environments.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_example_of_an_own_environment_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands on the page, with the params beside it."""
    (code,) = _blocks("python")
    params = yaml.safe_load(_blocks("yaml")[1])
    name = code.partition("\n")[0].removeprefix("# ")
    (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    model = ModelConfig.model_validate({"base": "scratch:tiny", **params["train_sft"]["model"]})
    assert model.tools is not None
    with Environments(model.tools) as environments:
        episode = environments.begin(tiny.problem(0, answer="12"))
        turns = ["Hm.", "I say 20", "5"]
        answers = [episode.step(turn).result() for turn in turns]
        assert [answer.failure for answer in answers] == [None] * 3
        texts = ["End with a whole number.", "Too high.", "Too low."]
        assert [answer.observation.text for answer in answers] == texts
        again = environments.begin(tiny.problem(0, answer="12"), past=turns)
        expected = Observation(done=True, rewards={"found": 1 / 3})
        assert episode.step("12").result().observation == again.step("12").result().observation == expected


def test_the_page_names_every_argument_and_its_default() -> None:
    """And no environment is missing."""
    assert list(ARGUMENTS) == list(BUILT_IN)
    parts = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE))
    assert list(ARGUMENTS) == list(parts)
    for environment, arguments in ARGUMENTS.items():
        for name, argument in arguments.model_fields.items():
            shown = f"`{name}`" if argument.default in (None, ...) or name == "answer" else f"`{name}` ({{}})"
            text = parts[environment] + (PAGE if name == "max_calls" else "")
            assert shown.format(argument.default) in text or (name == "file" and "`file`" in text), name
