"""Registrations with the real git, DVC and GTO: policies, configs, and the stage as the runners run it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from components.register.config import RegisterConfig
from components.register.register import STAGE
from components.shared import jsonl, lineage, stage
from tests.report.synthetic import made_by_grpo, report_on


def make_policy(folder: Path, weights: bytes = b"weights") -> Path:
    """A folder as train_grpo writes it, with these weights."""
    (folder / "extra").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "pipeline.json").write_text('{"prompt": "{question}", "answer": "declared"}')
    (folder / "model.safetensors").write_bytes(weights * 100_000)
    (folder / "extra" / "empty.txt").write_text("")
    lineage.write(folder, made_by_grpo())
    return folder


def make_config(folder: Path, **values: Any) -> RegisterConfig:
    """A registry inside `folder`, which may be the working folder."""
    return RegisterConfig.model_validate({"registry": str(folder / "registry"), "name": "grpo-policy", **values})


def run_register(config: RegisterConfig, policy: Path, report: Path, out: Path) -> dict[str, Any]:
    """Run the stage with the report turned into one on this policy; returns version.json."""
    stage.run(STAGE, config, {"policy": policy, "report": report_on(report, policy), "registration": out})
    version: dict[str, Any] = jsonl.read_json(out / "version.json")
    return version


def command(config: RegisterConfig, policy: Path, report: Path, folder: Path) -> list[str]:
    """The command that does the same, with its output in `folder`."""
    params = folder / "params.yaml"
    params.write_text(json.dumps({"register": config.model_dump()}))
    report = report_on(report, policy)
    options = {"params": params, "policy": policy, "report": report, "registration": folder / "registration"}
    return [sys.executable, "-m", "components.register", *(f"--{name}={value}" for name, value in options.items())]


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return what it prints."""
    identity = ["-c", "user.name=a", "-c", "user.email=b"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def tags(registry: Path) -> list[str]:
    """The versions in a registry."""
    return git(registry, "tag", "--list", "*@v*").split()
