"""The errors that a person meets when a stage is run: one line, exit code 2, and nothing half-written."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from components.prepare_data.config import PrepareConfig
from components.prepare_data.prepare import STAGE
from components.shared.environment import JOURNAL_VARIABLE
from components.shared.stage import run
from tests.presets import preset
from tests.report.synthetic import make_run, write_bare_report

ROOT = Path(__file__).parents[1]
PARAMS: dict[str, Any] = preset()
FOLDERS = {
    "prepare_data": ["out/problems"],
    "validate_data": ["problems", "out/validation"],
    "train_sft": ["problems", "out/base_model", "out/reference", "out/training"],
    "train_grpo": ["problems", "reference", "out/policy", "out/training", "out/timings"],
    "evaluate": ["reference:model", "problems", "out/evaluation"],
    "report": [
        *("run/base_evaluation", "run/sft_evaluation", "run/grpo_evaluation"),
        *("run/sft_training", "run/grpo_training", "run/validation", "out/report"),
    ],
    "register": ["policy", "made_report:report", "out/registration"],
}
LIGHT = ["prepare_data", "validate_data", "report", "register"]
"""Stages without torch, whose import takes seconds: what all stages do alike is tried on these and one more."""
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good inputs for every stage; only the model folders hold no model."""
    folder = tmp_path_factory.mktemp("inputs")
    config = PrepareConfig.model_validate(PARAMS["prepare_data"])
    run(STAGE, config, {"problems": folder / "problems"})
    make_run(folder / "run", problems=40)
    for name in ("reference", "policy"):
        (folder / name).mkdir()
    write_bare_report(folder / "made_report", folder / "policy")
    rows = [{"question": f"What is {number} plus 1?", "answer": f"#### {number + 1}"} for number in range(2000)]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[split == "test" :: 2]))
    return folder


class Project:
    """A folder in which a person runs single stages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.params: dict[str, Any] = json.loads(json.dumps(PARAMS))
        self.params["report"]["gate"]["target"] = ["words"]  # the source of the run that is made up
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != JOURNAL_VARIABLE},
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GX_ANALYTICS_ENABLED": "false",
            "HF_HUB_OFFLINE": "1",
        }

    def command(self, stage: str) -> list[str]:
        """What is typed to run a stage, with the params as they are now."""
        (self.folder / "params.yaml").write_text(yaml.safe_dump(self.params, sort_keys=False))
        command = [sys.executable, "-m", f"components.{stage}", "--params", "params.yaml"]
        for folder in FOLDERS[stage]:
            path, _, name = folder.partition(":")
            command += [f"--{(name or Path(path).name).replace('_', '-')}", path]
        return command

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, in a process of its own."""
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )

    def run_stage(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run `python -m components.<stage> ...` in this process."""
        entry = ROOT / f"{command[2].replace('.', '/')}/__main__.py"
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
        return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())

    def refusal(self, stage: str) -> str:
        """Run a stage that has to fail, see that it does so properly, and return what it says."""
        command, before = self.command(stage), self._files()
        message = _the_line(self.run_stage(command), stage)
        assert self._files() == before
        return message

    def refusal_on(self, mount: str, stage: str) -> str:
        """The same where the outputs are to go to a file system of its own."""
        (self.folder / "out").mkdir()
        # The file system is gone with the command: what is left on it is listed while it is there.
        script = f'mount -t tmpfs -o {mount} tmpfs out && "$@"; code=$?; find out -mindepth 1 > left; exit $code'
        message = _the_line(self.run(*NAMESPACE, "sh", "-c", script, "sh", *self.command(stage)), stage)
        assert (self.folder / "left").read_text() == ""
        return message

    def use_gsm8k(self, **paths: str) -> None:
        """Have prepare_data read files."""
        files = {"train": "train.jsonl", "test": "test.jsonl", **paths}
        self.params["prepare_data"]["sources"] = [{"kind": "gsm8k", **files}]

    def use_base(self, **files: str) -> None:
        """Start from a model folder with these files."""
        (self.folder / "base").mkdir()
        for name, text in files.items():
            (self.folder / "base" / name.replace("_json", ".json")).write_text(text)
        for stage in ("validate_data", "train_sft"):
            self.params[stage]["model"]["base"] = "base"

    def _files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.name != "out"}


def _the_line(done: subprocess.CompletedProcess[str], stage: str) -> str:
    """What stands behind `error: ` in the only line that a failed command has written."""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    return done.stderr.removeprefix("error: ").removeprefix(f"{stage}: ").rstrip("\n")


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


@pytest.mark.parametrize("stage", [*LIGHT, pytest.param("train_grpo", marks=pytest.mark.slow)])
def test_an_unknown_key(project: Project, stage: str) -> None:
    """File, line and key, with the one that was meant."""
    key = next(iter(project.params[stage]))
    project.params[stage][f"{key}s"] = project.params[stage].pop(key)
    message = project.refusal(stage)
    lines = (project.folder / "params.yaml").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if text.startswith(f"  {key}s:"))
    assert message == f"params.yaml:{line}: {stage}.{key}s: unknown key; did you mean `{key}`?"


@pytest.mark.parametrize(
    ("stage", "keys", "value", "message"),
    [
        ("prepare_data", ["sources", 0, "num_train"], "many", "sources.0.num_train: input should be a valid integer"),
        ("report", ["gate", "enforce"], "perhaps", "gate.enforce: input should be a valid boolean"),
        ("register", ["name"], 7, "name: input should be a valid string"),
    ],
)
def test_a_wrong_type(project: Project, stage: str, keys: list[str | int], value: Any, message: str) -> None:
    """File, line and key, with the type that is accepted."""
    section = project.params[stage]
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    said = project.refusal(stage)
    line = int(said.split(":")[1])
    assert said.startswith(f"params.yaml:{line}: {stage}.{message}")
    assert f"{keys[-1]}:" in (project.folder / "params.yaml").read_text().splitlines()[line - 1]


def test_a_params_file_that_is_not_there(project: Project) -> None:
    """It is named as it was typed."""
    command = [word.replace("params.yaml", "nope.yaml") for word in project.command("prepare_data")]
    assert _the_line(project.run_stage(command), "prepare_data") == "nope.yaml: no such params file"


@pytest.mark.parametrize(
    ("stage", "gone", "message"),
    [
        ("prepare_data", "train.jsonl", "train.jsonl: no such file; `make data` fetches GSM8K and MATH-500"),
        ("validate_data", "problems/test.jsonl", "problems/test.jsonl: no such file"),
        ("validate_data", "problems", "input `problems`: problems is not a folder; run the stage that makes it first"),
        ("report", "run/sft_evaluation/records.jsonl", "run/sft_evaluation/records.jsonl: no such file"),
        ("report", "run/grpo_training", "input `grpo_training`: run/grpo_training is not a folder"),
        ("register", "made_report/verdict.json", "made_report/verdict.json: no such file"),
        pytest.param("train_sft", "problems/train.jsonl", "problems/train.jsonl: no such", marks=pytest.mark.slow),
        pytest.param("train_grpo", "reference/x", "reference/pipeline.json: no such file", marks=pytest.mark.slow),
    ],
)
def test_a_missing_file_or_folder(project: Project, stage: str, gone: str, message: str) -> None:
    """It is named, and where another stage makes it, so is that."""
    project.use_gsm8k()
    path = project.folder / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    assert project.refusal(stage).startswith(message)


@pytest.mark.parametrize(
    ("stage", "cut", "message"),
    [
        ("prepare_data", "train.jsonl", "train.jsonl:1000: not valid JSON"),
        ("validate_data", "problems/train.jsonl", "problems/train.jsonl:400: not valid JSON"),
        ("report", "run/grpo_evaluation/records.jsonl", "run/grpo_evaluation/records.jsonl:120: not valid JSON"),
        ("report", "run/sft_evaluation/scores.json", "run/sft_evaluation/scores.json: not valid JSON"),
        ("register", "made_report/verdict.json", "made_report/verdict.json: not valid JSON"),
    ],
)
def test_a_truncated_file(project: Project, stage: str, cut: str, message: str) -> None:
    """A copy that was cut off is found by its last line."""
    project.use_gsm8k()
    project.params["prepare_data"]["max_malformed_fraction"] = 0.0
    path = project.folder / cut
    path.write_bytes(path.read_bytes()[:-10])
    said = project.refusal(stage)
    assert message in said
    assert stage == "prepare_data" or said.startswith(message)
    assert "is the file truncated?" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train.jsonl: contains no row"),
        (b"{}\n" * 50, "train.jsonl: 50 of 50 rows are malformed, more than prepare_data.max_malformed_fraction"),
        (b"<html>404</html>\n", "train.jsonl: 1 of 1 rows are malformed"),
        (b'{"question": "caf\xe9?", "answer": "#### 1"}\n', "train.jsonl:1: not UTF-8 text (byte 17 of the line)"),
    ],
    ids=["empty", "all malformed", "a web page", "Latin-1"],
)
def test_a_dataset_that_cannot_be_used(project: Project, content: bytes, message: str) -> None:
    """The file, how much of it, and the first reason."""
    project.use_gsm8k()
    (project.folder / "train.jsonl").write_bytes(content)
    assert message in project.refusal("prepare_data")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "problems/train.jsonl: holds no problem"), (b'{"id": "caf', "problems/train.jsonl:1: not valid JSON")],
    ids=["empty", "truncated"],
)
@pytest.mark.slow
def test_problems_that_cannot_be_trained_on(project: Project, content: bytes, message: str) -> None:
    """Training finds out before it makes anything."""
    (project.folder / "problems/train.jsonl").write_bytes(content)
    assert message in project.refusal("train_sft")


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"{}\n" * 50], ids=["empty", "all malformed"])
def test_problems_that_are_rejected(project: Project, content: bytes) -> None:
    """A verdict: one line and the exit code as for any error, and the whole report to read why."""
    (project.folder / "problems/train.jsonl").write_bytes(content)
    said = _the_line(project.run_stage(project.command("validate_data")), "validate_data")
    assert " is not met (" in said
    assert said.endswith("; report.html has the details")
    left = {path.name for path in (project.folder / "out").rglob("*")}
    assert left == {"validation", "result.json", "report.html", "lineage.json"}


@pytest.mark.slow
def test_a_base_model_without_weights(project: Project) -> None:
    """Fine-tuning has nothing to start from."""
    project.use_base(config_json='{"model_type": "qwen3"}')
    assert project.refusal("train_sft").startswith("model base: holds no weights; one of model.safetensors")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "model base: holds no tokenizer.json; a Hugging Face model folder is expected"),
        ({"tokenizer_json": '{"version": '}, "base/tokenizer.json: cannot be read as a tokenizer (EOF while parsing"),
    ],
)
def test_a_base_model_without_a_tokenizer(project: Project, files: dict[str, str], message: str) -> None:
    """It is noticed when the data are validated, before a GPU is asked for."""
    project.use_base(**files)
    assert project.refusal("validate_data").startswith(message)


def test_a_base_model_that_cannot_be_fetched(project: Project) -> None:
    """Without a network a hub id is as good as a misspelt one."""
    project.params["validate_data"]["model"]["base"] = "nobody/no-such-model"
    assert project.refusal("validate_data").startswith("nobody/no-such-model: neither a folder nor a model that can be")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "kilobytes"),
    [
        ("prepare_data", 64),
        ("prepare_data", 4),
        ("validate_data", 12),
        ("report", 40),
        ("train_sft", 200),
        ("train_sft", 900),
    ],
)
def test_a_full_disk(mounting: Project, stage: str, kilobytes: int) -> None:
    """Whichever library was writing, the line says the same: where, how much is written, and how much is free."""
    line = (
        r"out/\.\w+\.partial\S*: no space left on device: [\d,]+ bytes are in \S+ so far, [\d,]+ are free; make room .+"
    )
    assert re.fullmatch(line, mounting.refusal_on(f"size={kilobytes}k", stage))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["prepare_data", "validate_data", "report"])
def test_a_file_system_that_is_read_only(mounting: Project, stage: str) -> None:
    """The place is named."""
    output = Path(FOLDERS[stage][-1]).name
    assert mounting.refusal_on("ro", stage) == f"out/.{output}.partial: read-only file system"


def _file_as_output(folder: Path, output: str) -> str:
    (folder / "out").mkdir()
    (folder / output).write_text("mine")
    return f"output `{Path(output).name}`: {output} is not a folder; name a new one"


def _file_as_parent(folder: Path, output: str) -> str:
    (folder / "out").write_text("mine")
    return f"out/.{Path(output).name}.partial: not a directory"


def _folder_of_another_kind(folder: Path, output: str) -> str:
    (folder / output).mkdir(parents=True)
    (folder / output / "thesis.tex").write_text("mine")
    return f"output `{Path(output).name}`: {output} has files that no stage made; name a new folder"


@pytest.mark.parametrize("occupy", [_file_as_output, _file_as_parent, _folder_of_another_kind])
@pytest.mark.parametrize("stage", LIGHT)
def test_something_else_where_the_output_goes(project: Project, stage: str, occupy: Callable[[Path, str], str]) -> None:
    """It is named and left as it is."""
    message = occupy(project.folder, FOLDERS[stage][-1])
    assert project.refusal(stage) == message
    kept = [path for path in [project.folder / "out", *project.folder.glob("out/**/*")] if path.is_file()]
    assert [path.read_text() for path in kept] == ["mine"]


@pytest.mark.slow
def test_something_else_where_the_last_of_several_outputs_goes(project: Project) -> None:
    """No output is made where one of them cannot be, and nothing is trained in vain."""
    message = _file_as_output(project.folder, FOLDERS["train_sft"][-1])
    command = project.command("train_sft")
    done = project.run_stage(command)
    assert (_the_line(done, "train_sft"), done.stdout) == (message, "")
    assert [path.name for path in (project.folder / "out").iterdir()] == ["training"]
