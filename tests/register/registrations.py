"""Registrations with the real git and DVC: policies, configs, and the stage as the runners run it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.register.config import RegisterConfig
from components.register.register import STAGE
from components.report import report
from components.report.config import ReportConfig
from components.shared import jsonl, lineage, stage
from tests.report.synthetic import SKILL, made_by_grpo, make_run, report_on, write_artifacts


def make_policy(folder: Path, weights: bytes = b"weights") -> Path:
    """A folder as train_grpo writes it, with these weights."""
    (folder / "extra").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "pipeline.json").write_text('{"prompt": "{question}", "answer": "declared"}')
    (folder / "model.safetensors").write_bytes(weights * 100_000)
    (folder / "extra" / "empty.txt").write_text("")
    lineage.write(folder, made_by_grpo())
    return folder


def make_report(
    folder: Path, *, enforce: bool, problems: int = 120, min_gain: float = 0.1, **skill: Mapping[str, float]
) -> dict[str, Path]:
    """Write a made-up run, and the report on it; return the folders by name."""
    gate = {"target": ["words"], "min_gain": min_gain, "max_p_value": 0.01, "margin": 0.5, "enforce": enforce}
    folders = {**make_run(folder, skill={**SKILL, **skill}, problems=problems), "report": folder / "report"}
    stage.run(report.STAGE, ReportConfig.model_validate({"gate": gate, "num_examples": 2}), folders)
    return folders


def make_config(folder: Path, **values: Any) -> RegisterConfig:
    """A registry inside `folder`, which may be the working folder."""
    return RegisterConfig.model_validate({"registry": str(folder / "registry"), "name": "grpo-policy", **values})


def inputs_of(report: Path, policy: Path) -> dict[str, Path]:
    """The inputs of the stage: the policy, what it was made from, and the report turned into one on all of that."""
    return {"policy": policy, **write_artifacts(policy), "report": report_on(report, policy)}


def inputs_of_task(inputs: dict[str, Path], folder: Path) -> dict[str, str]:
    """The same inputs as the Kubeflow component takes them: a folder for the outputs of each task."""
    tasks = {"policy": "grpo", "grpo_training": "grpo", "evaluation": "evaluation", "report": "report"}
    for name, source in inputs.items():
        task = tasks.get(name, "sft")
        shutil.copytree(source, folder / task / ("training" if name.endswith("training") else name))
    return {"problems": str(inputs["problems"]), **{task: str(folder / task) for task in {*tasks.values(), "sft"}}}


def run_register(config: RegisterConfig, policy: Path, report: Path, out: Path) -> dict[str, Any]:
    """Run the stage with the report turned into one on this policy; returns version.json."""
    stage.run(STAGE, config, {**inputs_of(report, policy), "registration": out})
    version: dict[str, Any] = jsonl.read_json(out / "version.json")
    return version


def command(config: RegisterConfig, policy: Path, report: Path, folder: Path) -> list[str]:
    """The command that does the same, with its output in `folder`."""
    params = folder / "params.yaml"
    params.write_text(json.dumps({"register": config.model_dump()}))
    options = {"params": params, **inputs_of(report, policy), "registration": folder / "registration"}
    words = (f"--{name.replace('_', '-')}={value}" for name, value in options.items())
    return [sys.executable, "-m", "components.register", *words]


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return what it prints."""
    identity = ["-c", "user.name=a", "-c", "user.email=b"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def set_hook(shared: Path, name: str, script: str) -> None:
    """Let a bare repository run a script at each push."""
    hook = shared / "hooks" / name
    hook.write_text(script)
    hook.chmod(0o755)


def subjects(registry: Path) -> list[str]:
    """The subjects of all commits of versions in a registry, without the branch that counts uses of test sets."""
    return git(registry, "log", "--exclude=refs/heads/looks", "--all", "--format=%s").splitlines()


def tags(registry: Path) -> list[str]:
    """The versions in a registry."""
    return git(registry, "tag", "--list", "*@v*").split()
