"""The errors that a person meets when a stage is run: one line, exit code 2, and nothing half-written.

What each file, key or model can have wrong is tested where it is read; here, what all stages promise alike.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from components.prepare_data.config import PrepareConfig
from components.prepare_data.prepare import STAGE
from components.shared.environment import JOURNAL_VARIABLE
from components.shared.stage import run
from tests.presets import ROOT, preset, write_params
from tests.report.synthetic import ARTIFACTS, make_run, write_artifacts, write_bare_report

FOLDERS = {
    "prepare_data": ["out/problems"],
    "validate_data": ["problems", "out/validation"],
    "train_sft": ["problems", "out/base_model", "out/reference", "out/training"],
    "train_grpo": ["problems", "reference", "out/policy", "out/training", "out/timings"],
    "report": ["run/evaluation", "run/sft_training", "run/grpo_training", "run/validation", "out/report"],
    "register": [
        *("policy", *(f"policy-{name}:{name}" for name in ARTIFACTS), "made_report:report", "out/registration"),
    ],
}
SLOW = pytest.mark.slow
"""Of stages that import torch, which takes seconds."""
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good inputs for every stage; only the model folders hold no model."""
    folder = tmp_path_factory.mktemp("inputs")
    config = PrepareConfig.model_validate(preset()["prepare_data"])
    run(STAGE, config, {"problems": folder / "problems"})
    make_run(folder / "run", problems=40)
    for name in ("reference", "policy"):
        (folder / name).mkdir()
    write_bare_report(folder / "made_report", folder / "policy")
    write_artifacts(folder / "policy")
    return folder


class Project:
    """A folder in which a person runs single stages."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.params = folder, preset()
        self.params["report"]["gate"]["target"] = ["words"]  # the source of the run that is made up

    def command(self, stage: str) -> list[str]:
        """What is typed to run a stage, with the params as they are now."""
        write_params(self.folder / "params.yaml", self.params)
        command = [sys.executable, "-m", f"components.{stage}", "--params", "params.yaml"]
        for folder in FOLDERS[stage]:
            path, _, name = folder.partition(":")
            command += [f"--{(name or Path(path).name).replace('_', '-')}", path]
        return command

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, in a process of its own."""
        environment = {name: value for name, value in os.environ.items() if name != JOURNAL_VARIABLE}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=300
        )

    def refusal(self, stage: str) -> str:
        """Run a stage that has to fail, in this process, see that it does so properly, and return its message."""
        command, before = self.command(stage), self._files()
        entry = ROOT / f"components/{stage}/__main__.py"
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            patch.object(sys, "argv", command[2:]),
            patch.dict(os.environ, clear=False) as environment,
        ):
            environment.pop(JOURNAL_VARIABLE, None)
            try:
                exec(compile(entry.read_text(), str(entry), "exec"), {"__name__": "__main__"})
            except SystemExit as ended:
                code = int(ended.code or 0)
        assert self._files() == before
        return _message(stage, code, err.getvalue())

    def refusal_on(self, mount: str, stage: str) -> str:
        """The same where the outputs are to go to a file system of its own."""
        (self.folder / "out").mkdir()
        # The file system is gone with the command: what is left on it is listed while it is there.
        script = f'mount -t tmpfs -o {mount} tmpfs out && "$@"; code=$?; find out -mindepth 1 > left; exit $code'
        done = self.run(*NAMESPACE, "sh", "-c", script, "sh", *self.command(stage))
        assert (self.folder / "left").read_text() == ""
        return _message(stage, done.returncode, done.stderr)

    def _files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


def _message(stage: str, code: int, errors: str) -> str:
    """What stands behind `error: ` in the only line that a failed command has written."""
    assert (code, errors.count("\n")) == (2, 1), errors
    assert errors.startswith("error: ")
    return errors.removeprefix("error: ").removeprefix(f"{stage}: ").rstrip("\n")


@pytest.fixture
def project(tmp_path: Path, inputs: Path) -> Project:
    """A copy of the inputs, to be spoiled."""
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    return Project(tmp_path)


@pytest.fixture
def mounting(project: Project) -> Project:
    """The same where a file system may be mounted that no other process sees."""
    done = project.run(*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(project.folder))
    if done.returncode:
        pytest.skip(f"mounting in a namespace of its own is not permitted here: {done.stderr.strip()}")
    return project


@pytest.mark.parametrize(
    ("stage", "key", "value", "message"),
    [
        ("prepare_data", "sources.0.num_train", "many", "input should be a valid integer"),
        pytest.param("train_grpo", "num_step", 3, "unknown key; did you mean `num_steps`?", marks=SLOW),
    ],
)
def test_a_wrong_key_or_value(project: Project, stage: str, key: str, value: Any, message: str) -> None:
    """File, line and key, with what is accepted."""
    section: Any = project.params[stage]
    *path, last = key.split(".")
    for part in path:
        section = section[int(part) if part.isdigit() else part]
    section[last] = value
    file, line, rest = project.refusal(stage).split(":", 2)
    assert file == "params.yaml"
    assert rest.startswith(f" {stage}.{key}: {message}")
    assert f"{last}:" in (project.folder / "params.yaml").read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize(
    ("stage", "gone", "message"),
    [
        ("prepare_data", "train.jsonl", "train.jsonl: no such file; `make data` fetches GSM8K, MATH-500 and SVAMP"),
        ("validate_data", "problems/test.jsonl", "problems/test.jsonl: no such file"),
        ("report", "run/grpo_training", "input `grpo_training`: run/grpo_training is not a folder"),
        ("register", "made_report/verdict.json", "made_report/verdict.json: no such file"),
        pytest.param("train_grpo", "reference/x", "reference/pipeline.json: no such file", marks=SLOW),
    ],
)
def test_a_missing_file_or_folder(project: Project, stage: str, gone: str, message: str) -> None:
    """It is named, and where another stage makes it, so is that."""
    files = {"train": "train.jsonl", "test": "problems/test.jsonl"}
    project.params["prepare_data"]["sources"] = [{"kind": "gsm8k", **files}]
    path = project.folder / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    assert project.refusal(stage).startswith(message)


@SLOW
@pytest.mark.parametrize(
    ("stage", "kilobytes"),
    [
        ("prepare_data", 64),
        ("report", 40),
        ("train_sft", 900),
    ],
)
def test_a_full_disk(mounting: Project, stage: str, kilobytes: int) -> None:
    """Whichever library was writing, the line says the same: where, how much is written, and how much is free."""
    line = (
        r"out/\.\w+\.partial\S*: no space left on device: [\d,]+ bytes are in \S+ so far, [\d,]+ are free; make room .+"
    )
    assert re.fullmatch(line, mounting.refusal_on(f"size={kilobytes}k", stage))


@SLOW
def test_a_file_system_that_is_read_only(mounting: Project) -> None:
    """The place is named."""
    assert mounting.refusal_on("ro", "prepare_data") == "out/.problems.partial: read-only file system"


def test_a_file_where_the_folder_of_the_output_goes(project: Project) -> None:
    """It is named and left as it is."""
    (project.folder / "out").write_text("mine")
    assert project.refusal("prepare_data") == "out/.problems.partial: not a directory"
    assert (project.folder / "out").read_text() == "mine"


@SLOW
def test_a_file_where_the_last_of_several_outputs_goes(project: Project) -> None:
    """No output is made where one of them cannot be, and nothing is trained in vain."""
    (project.folder / "out").mkdir()
    (project.folder / "out/training").write_text("mine")
    assert project.refusal("train_sft") == "output `training`: out/training is not a folder; name a new one"
    assert [path.name for path in (project.folder / "out").iterdir()] == ["training"]
