"""Single keys of a run that are set on the command line."""

from pathlib import Path

import pytest

from components.preflight.config import load_params
from components.shared.errors import PipelineError
from pipelines.run.settings import load
from tests.presets import ROOT

SMOKE = ROOT / "params/smoke.yaml"


def test_keys_are_set_before_the_file() -> None:
    """Values are YAML; null means the default, a number an item of a list; sections share their keys as in a file."""
    assert load(SMOKE) == load_params(SMOKE)
    settings = ["train_grpo.num_steps=7", "train_grpo.reward.weights={accuracy: 2}", "evaluate.max_new_tokens=null"]
    settings += ["prepare_data.sources.0.num_test=80", "register.registry=other", "train_sft.model.base=scratch:words"]
    params = load(SMOKE, settings)
    assert (params.train_grpo.num_steps, params.train_grpo.reward.weights) == (7, {"accuracy": 2.0})
    assert params.evaluate.max_new_tokens == type(params.evaluate).model_fields["max_new_tokens"].default
    assert params.prepare_data.sources[0].max_problems(params.evaluate.split) == 80
    assert params.train_grpo.registry == "other"
    assert params.validate_data.model.base == "scratch:words"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train_grpo.num_stepz=7", "--set train_grpo.num_stepz: unknown key; did you mean `num_steps`?"),
        ("train_grpo.num_steps=-1", "--set train_grpo.num_steps: input should be greater than"),
        ("train_grpo.num_steps", "--set train_grpo.num_steps: write KEY=VALUE, such as train_grpo.num_steps=10"),
        ("num_steps=7", "--set num_steps=7: name a key of a stage, such as train_grpo.num_steps"),
        ("train_grpo.reward.weights={", "--set train_grpo.reward.weights={: the value is not valid YAML"),
        ("train_grpo.num_steps.a=1", "--set train_grpo.num_steps.a: `num_steps` is 3 and has no keys"),
        ("prepare_data.sources.5.kind=1", "--set prepare_data.sources.5.kind: the list has items 0 to 0, no `5`"),
    ],
)
def test_a_wrong_setting_is_named(setting: str, message: str) -> None:
    """One line with the key, and what is accepted."""
    with pytest.raises(PipelineError) as raised:
        load(SMOKE, [setting])
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_errors_of_file_and_settings_come_together(tmp_path: Path) -> None:
    """Those of the file with its line."""
    path = tmp_path / "wrong.yaml"
    path.write_text(f"extends: {SMOKE}\nevaluate: {{num_samples: -1}}\n")
    with pytest.raises(PipelineError, match=r"--set train_grpo\.x: unknown .*\n.*wrong\.yaml:2: evaluate\.num_s"):
        load(path, ["train_grpo.x=1"])
