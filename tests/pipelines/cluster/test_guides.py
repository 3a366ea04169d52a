"""The commands of the guides: what works without a cluster is run, the rest is held against the programs' own help."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from components.preflight.config import load_params
from tests.k8s.rendered import ROOT, render, require_kubectl
from tests.k8s.test_manifests import faults

pytestmark = pytest.mark.slow
GUIDES = (
    "kubernetes",
    "kubernetes-one-machine",
    "kubernetes-pipelines",
    "kubernetes-platform",
    "kubernetes-kueue",
    "kubeflow-ui",
    "kubeflow-results",
    "kubeflow-failed-run",
    "cluster-check",
    "troubleshooting",
)
STANDS_IN = Path(__file__).with_name("commands_run.py")
PROGRAMS = ("kubectl", "podman", "docker", "kind", "make", "grpo-pipeline")
_HEAD = """apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../k8s/overlays/multi-user]
"""


class Call(NamedTuple):
    """A program as a guide calls it."""

    command: list[str]
    folder: Path


def blocks(guide: str) -> list[str]:
    """The shell of a guide, block by block."""
    return re.findall(r"^```bash\n(.*?)^```$", _text(guide), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module", params=GUIDES)
def calls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Every call of a program in a guide, whose blocks were run one after the other in a copy of the project."""
    require_kubectl()
    folder = tmp_path_factory.mktemp(request.param)
    clone, programs, log = folder / "clone", folder / "bin", folder / "commands.jsonl"
    clone.mkdir()
    programs.mkdir()
    for name in ("k8s", "params", "params.yaml", "docs"):
        (clone / name).symlink_to(ROOT / name)
    for name in PROGRAMS:
        (programs / name).write_text(f"#!{sys.executable}\n{STANDS_IN.read_text()}")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "COMMANDS": str(log),
        "KUBECTL": str(shutil.which("kubectl")),
    }
    script = "set -euo pipefail\n" + "\n".join(blocks(request.param)) + "\nwait\n"
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [Call(line["command"], Path(line["folder"])) for line in lines]


def test_no_program_is_called_that_is_not_looked_at(calls: list[Call]) -> None:
    """Every line of the guides begins with one of these, or with something that the shell itself does."""
    assert {call.command[0] for call in calls} <= set(PROGRAMS)
    known = {*PROGRAMS, "export", "mkdir", "cat", "umask", "rm"}
    for guide in GUIDES:
        for block in blocks(guide):
            commands = re.sub(r"<<'?END'?\n.*?^END$", "", block, flags=re.DOTALL | re.MULTILINE)
            assert {line.split()[0] for line in commands.splitlines() if line.strip()} <= known


def test_kubectl_knows_every_option(calls: list[Call]) -> None:
    """By its own help, for the command in question."""
    for call in _of(calls, "kubectl"):
        words = {"create": 3 if call.command[2] == "secret" else 2, "auth": 2}.get(call.command[1], 1)
        known = _help(*call.command[1 : 1 + words])
        for argument in call.command[2:]:
            if argument.startswith("--"):
                assert re.search(rf"^\s+(-\w, )?{re.escape(argument.partition('=')[0])}\b", known, re.MULTILINE), call


def test_what_is_applied_from_here_is_valid(calls: list[Call]) -> None:
    """Folders that are named exist and render, with nothing unknown; the rest comes from where it is published."""
    published = ("github.com/kubeflow/", "https://github.com/kubernetes-sigs/")
    for call in _of(calls, "kubectl"):
        if call.command[1] == "apply":
            source = call.command[-1]
            if not source.startswith(published):
                documents = render((call.folder / source).resolve())
                assert documents
                assert [faults(document) for document in documents] == [[]] * len(documents)


@pytest.mark.parametrize("guide", GUIDES)
def test_yaml_in_a_guide_is_valid(guide: str, tmp_path: Path) -> None:
    """A params file is loaded; any other example is tried in a kustomization on top of an overlay."""
    for name in ("k8s", "params", "params.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for number, example in enumerate(re.findall(r"^```yaml\n(.*?)^```$", _text(guide), re.DOTALL | re.MULTILINE)):
        if "extends:" in example:
            (tmp_path / "example.yaml").write_text(example)
            load_params(tmp_path / "example.yaml")
            continue
        site = tmp_path / f"site-{number}"
        site.mkdir()
        (site / "kustomization.yaml").write_text(f"{_HEAD}{example}")
        assert [faults(document) for document in render(site)]


def _text(guide: str) -> str:
    return (ROOT / "docs/how-to" / f"{guide}.md").read_text(encoding="utf-8")


def _of(calls: list[Call], program: str) -> list[Call]:
    return [call for call in calls if call.command[0] == program]


@lru_cache
def _help(*verb: str) -> str:
    answers: Any = [
        subprocess.run(["kubectl", *arguments], capture_output=True, text=True, check=True).stdout
        for arguments in ([*verb, "--help"], ["options"])
    ]
    return "\n".join(answers)
