import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from components.preflight.config import load_params
from components.shared.environment import ENDPOINT_VARIABLES
from components.shared.errors import PipelineError
from pipelines.cli import main
from pipelines.run.settings import load
from tests.pipelines.conftest import Program
from tests.presets import ROOT

SMOKE = ROOT / "params/smoke.yaml"


def test_a_params_file_can_be_printed_in_full(tmp_path: Path, program: Program) -> None:
    """With what it extends, all defaults and keys that are set, as a params file that means the same."""
    setting = "train_grpo.num_steps=7"
    (tmp_path / "full.yaml").write_text(program("config", "--params", str(SMOKE), "--set", setting).out)
    assert load_params(tmp_path / "full.yaml") == load(SMOKE, [setting])


def test_an_unknown_option_is_answered_with_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Not with that of the whole program."""
    with pytest.raises(SystemExit):
        main(["models", "show", "v0.0.1", "--parms", "x"])
    error = capsys.readouterr().err
    assert error.startswith("usage: grpo-pipeline models show ")
    assert error.endswith("grpo-pipeline models show: error: unrecognized arguments: --parms x\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --from nope", "--from nope: no such stage; there are prepare_data, validate_data, "),
        ("run --resume latest", "outputs/runs: there are no runs; `grpo-pipeline run` makes one"),
        ("run --resume latest --params params.yaml", "--resume takes the params of the run; leave out --params"),
        ("compile --output=x.txt", "--output x.txt: should be a file whose name ends in .yaml"),
        ("grade nope.jsonl", "nope.jsonl: no such file or directory"),
        ("chat nowhere --question=", "chat: the question is empty"),
        ("chat nowhere --question=\udcff", "chat: the question is not UTF-8 text"),
        # Before the graph is compiled, which takes half a minute.
        ("submit --pipeline nope.yaml", "no address of Kubeflow Pipelines: pass --endpoint URL or set "),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program, arguments: str, message: str
) -> None:
    """Exit code 2, no traceback, and nothing is made."""
    for name in (*ENDPOINT_VARIABLES, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    lines, error = program(*arguments.split(), code=2)
    assert (lines, error.count("\n")) == ([], 1)
    assert error.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_known_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    """A line for each key, exit code 2, and no trace of a run, with or without `--dry-run`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "own.yaml").write_text(f"extends: {SMOKE}\nreport: {{gate: {{target: [gsm8k]}}}}\n", encoding="utf-8")
    faults = {"own.yaml": "is not a folder", "/proc/no": "cannot be made", ".": "contains something other"}
    command = [
        "run",
        "--params=own.yaml",
        "--set=train_sft.model.base=./nowhere",
        "--set=train_grpo.validation.patience=1",
    ]
    for (place, fault), options in zip(faults.items(), ([], ["--dry-run"], []), strict=True):
        error = program(*command, f"--set=register.registry={place}", *options, code=2).error
        assert "\n--set train_sft.model.base: ./nowhere: no such folder\n" in error
        assert "\n--set train_grpo.validation: no source has dev problems" in error
        assert fault in error.partition("register.registry: ")[2]
        assert '\nown.yaml:2: report.gate.target: no test problem comes from "gsm8k"; sources with' in error
        assert (error.find("error: 4 problems to correct before this run can start\n"), error.count("\n")) == (0, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml"]
    (tmp_path / "outputs").touch()
    monkeypatch.setattr("pipelines.run.local.records", lambda _: ["a result to reuse"])
    monkeypatch.setattr("shutil.disk_usage", Mock(return_value=Mock(free=0)))
    command = ["run", f"--params={SMOKE}", "--dry-run"]
    assert program(*command, code=2).error == "error: outputs is not a folder\n"
    assert "0 bytes are free" in program(*command, "--fresh", code=2).error


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in `config | head -1`: nothing is printed on standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pipelines.cli", "config"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_ctrl_c_and_a_missing_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    """While a command still imports and checks what it needs; an installed copy has neither params files nor a lock."""
    monkeypatch.setattr("pipelines.limits.limits", Mock(side_effect=KeyboardInterrupt))
    assert program("limits", code=128 + signal.SIGINT).error == "stopped\n"
    monkeypatch.setattr("pipelines.cli._CHECKOUT", tmp_path)
    assert program("run", code=2).error.startswith(f"error: {tmp_path} is not a checkout of grpo-pipeline; ")


def test_what_follows_two_dashes_is_handed_on_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the model stands behind options of the command."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr("pipelines.use.serve", lambda **options: asked.update(options))
    assert main(["serve", "--port", "8001", "MODEL", "--", "--max-model-len", "512"]) == 0
    assert (asked["port"], asked["vllm_options"]) == (8001, ["--max-model-len", "512"])


def test_keys_are_set_before_the_file() -> None:
    """Values are YAML; null means the default, a number an item of a list; sections share their keys as in a file."""
    assert load(SMOKE) == load_params(SMOKE)
    settings = ["train_grpo.num_steps=7", "train_grpo.reward.weights={accuracy: 2}", "evaluate.max_new_tokens=null"]
    settings += ["prepare_data.sources.0.num_test=80", "register.registry=other", "train_sft.model.base=scratch:words"]
    params = load(SMOKE, settings)
    assert (params.train_grpo.num_steps, params.train_grpo.reward.weights) == (7, {"accuracy": 2.0})
    assert params.evaluate.max_new_tokens == type(params.evaluate).model_fields["max_new_tokens"].default
    assert params.prepare_data.sources[0].max_problems(params.evaluate.split) == 80
    assert (params.train_grpo.registry, params.validate_data.model.base) == ("other", "scratch:words")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train_grpo.loss.seed=7", "--set train_grpo.loss.seed: unknown key; did you mean `train_grpo.seed`?"),
        ("train_grpo.num_steps=-1", "--set train_grpo.num_steps: should be above 0, got -1"),
        ("train_grpo.num_steps", "--set train_grpo.num_steps: write KEY=VALUE, such as train_grpo.num_steps=10"),
        (
            "num_steps=7",
            "--set num_steps=7: no stage is named; expected STAGE.KEY=VALUE, such as train_grpo.num_steps=100",
        ),
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
    """A rule for two keys has the value of each, and its line, `--set` or the default; it may begin with its key."""
    path = tmp_path / "own.yaml"
    path.write_text(f"extends: {SMOKE}\ntrain_sft:\n  num_steps: 7\n  warmup_steps: 8\n")
    changes = ["report.x=1", "train_sft.num_steps=6", "train_grpo.reference=adapters", "evaluate.system_prompt=x"]
    with pytest.raises(PipelineError) as raised:
        load(path, changes)
    unknown, sft, grpo, evaluate = str(raised.value).splitlines()[1:]
    values = f"(train_sft.warmup_steps is 8, {path}:4; train_sft.num_steps is 6, --set)"
    assert sft == f"{path}:4: train_sft: warmup_steps must be smaller than num_steps {values}"
    assert unknown.startswith("--set report.x: unknown key")
    assert grpo.startswith('--set train_grpo.reference: adapters needs engine.lora (train_grpo.reference is "adapters"')
    assert grpo.endswith("; train_grpo.engine.lora is not set)")
    assert evaluate.endswith('(evaluate.system_prompt is "x", --set; evaluate.protocol is "pipeline" by default)')
