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
from pipelines.cli import main
from pipelines.run.settings import load
from tests.pipelines.project import Project
from tests.presets import ROOT, preset, write_params


def test_a_params_file_can_be_printed_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what it extends, all defaults and keys that are set, as a params file that means the same."""
    setting = "train_grpo.num_steps=7"
    assert main(["config", "--params", str(ROOT / "params/smoke.yaml"), "--set", setting]) == 0
    (tmp_path / "full.yaml").write_text(capsys.readouterr().out)
    assert load_params(tmp_path / "full.yaml") == load(ROOT / "params/smoke.yaml", [setting])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --from nope", "--from nope: no such stage; there are prepare_data, validate_data, "),
        ("run --resume latest", "outputs/runs: there are no runs; `grpo-pipeline run` makes one"),
        ("run --resume latest --params params.yaml", "--resume takes the params of the run; leave out --params"),
        ("grade nope.jsonl", "nope.jsonl: no such file or directory"),
        # Before the graph is compiled, which takes half a minute.
        ("submit --pipeline nope.yaml", "no address of Kubeflow Pipelines: pass --endpoint URL or set "),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    """Exit code 2, no traceback, and nothing is made."""
    for name in (*ENDPOINT_VARIABLES, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("report.gate.target=[gsm8k]", 'report.gate.target: no test problem comes from "gsm8k"; sources with'),
        ("train_sft.model.base=./nowhere", "train_sft.model.base: ./nowhere: no such folder"),
        ("register.registry=a.file", "register.registry: a.file is not a folder"),
    ],
)
def test_what_can_be_known_is_known_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    """One line with the key, exit code 2, and no trace of a run, with or without `--dry-run`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.file").touch()
    command = ["run", "--params", str(ROOT / "params/smoke.yaml"), "--set", setting]
    for options in ([], ["--dry-run"]):
        assert main([*command, *options]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.file"]


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in `config | head -1`: nothing is printed on standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pipelines.cli", "config"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_ctrl_c_and_a_missing_checkout_are_answered_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a command still imports and checks what it needs; an installed copy has neither params files nor a lock."""
    monkeypatch.setattr("pipelines.limits.limits", Mock(side_effect=KeyboardInterrupt))
    assert main(["limits"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "stopped\n"
    monkeypatch.setattr("pipelines.cli._CHECKOUT", tmp_path)
    assert main(["run"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is not a checkout of grpo-pipeline; ")


@pytest.mark.slow
def test_a_failing_stage_ends_the_run_with_its_own_exit_code(tmp_path: Path) -> None:
    """The graph stops at the stage, whose error is shown as one line; the log is kept and named."""
    params = preset()
    params["prepare_data"]["sources"] = [{"kind": "gsm8k", "train": "rows.jsonl", "test_fraction": 0.2}]
    params["report"]["gate"]["target"] = ["gsm8k"]
    good = "".join(f'{{"question": "{number} + 1?", "answer": "#### {number + 1}"}}\n' for number in range(400))
    (tmp_path / "rows.jsonl").write_text(good + "{}\n" * 600)
    write_params(tmp_path / "malformed.yaml", params)
    run = Project(tmp_path).pipeline("run", "--params", "malformed.yaml")
    assert run.exit_code == 2
    assert run.errors.strip().startswith("error: rows.jsonl: 600 of ")
    assert run.errors.count("\n") == 1
    assert [line for line in run.printed.splitlines() if line.startswith("[")] == ["[1/7] prepare_data"]
    (log,) = tmp_path.glob("outputs/runs/*-malformed/run.log")
    assert str(log.relative_to(tmp_path)) in run.printed
    assert not (tmp_path / "outputs/latest").exists()


def test_what_follows_two_dashes_is_handed_on_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the model stands behind options of the command."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr("pipelines.use.serve", lambda **options: asked.update(options))
    assert main(["serve", "--port", "8001", "MODEL", "--", "--max-model-len", "512"]) == 0
    assert (asked["port"], asked["handed_on"]) == (8001, ["--max-model-len", "512"])
